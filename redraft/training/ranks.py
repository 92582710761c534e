"""The processes that torchrun starts for one command, over one machine or several: its ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
import typer
from safetensors import SafetensorError

T = TypeVar("T")
PATIENCE = timedelta(hours=3)
"""How long a rank waits for another, which may build an engine or judge a drafter meanwhile. One that has ended is
noticed at once."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks of its command."""

    index: int
    count: int
    local_count: int
    """Ranks of its machine"""

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def first(self) -> bool:
        """Whether it is the one that speaks, judges and writes checkpoints."""
        return self.index == 0

    @property
    def threads(self) -> int | None:
        """Its share of the cores of its machine; of a process that is the only one None, which is all."""
        return None if self.count == 1 else max(len(os.sched_getaffinity(0)) // self.local_count, 1)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank. Every rank must call it."""
        if self.count == 1:
            return [value]
        values: list[T | None] = [None] * self.count
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def from_first(self, value: T) -> T:
        """The first rank's value. Every rank must call it."""
        values = [value]
        if self.count > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def in_turn(self, work: Callable[[], T]) -> T:
        """Do some work on one rank after the other. Every rank must call it."""
        for turn in range(self.count):
            if turn == self.index:
                result = work()
            self.gather(None)
        return result

    def require_common(self, folder: Path) -> None:
        """Check that the ranks have a folder in common, where each names it. Every rank must call it. Raises as
        `agreement` does where one has another."""
        if self.count == 1:
            return
        mark = folder / self.from_first(f".{uuid4().hex}")
        try:
            with self.agreement():
                if self.first:
                    folder.mkdir(parents=True, exist_ok=True)
                    mark.touch()
            with self.agreement():
                if not mark.exists():
                    raise ValueError(f"{folder} is not the folder of rank 0: expected a disk that all machines share")
        finally:
            if self.first:
                mark.unlink(missing_ok=True)

    def named(self, message: str) -> str:
        """What this rank says, with its number where there are others."""
        return message if self.count == 1 else f"rank {self.index}: {message}"

    def program(self, name: str) -> str:
        """What this rank's own lines begin with: a command's name, with the rank's number after the first one."""
        return name if self.first else f"{name}: rank {self.index}"

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, in its place. Every rank must call it."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    @contextmanager
    def agreement(self) -> Iterator[dict[str, str]]:
        """Check the input on every rank. What is inside fills in, by name, what must be the same on all of them.

        Where it raises OSError, ValueError, RuntimeError, SafetensorError or typer.BadParameter on any rank, or where
        ranks differ, the first rank raises ValueError, which names the rank, and the others end. A process that is the
        only one raises what was raised.
        """
        facts: dict[str, str] = {}
        failure = ""
        try:
            yield facts
        except (OSError, ValueError, RuntimeError, SafetensorError, typer.BadParameter) as error:
            if self.count == 1:
                raise
            failure = str(error) or type(error).__name__
        answers = self.gather((failure, facts))
        message = _first_failure([failure for failure, _ in answers]) or _difference([facts for _, facts in answers])
        if message and self.first:
            raise ValueError(message)
        if message:
            sys.exit(2)


ALONE = Ranks(0, 1, 1)
"""Without torchrun."""


def this_rank() -> Ranks:
    """The place of this process."""
    if not dist.is_initialized():
        return ALONE
    return Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))


def of_several() -> bool:
    """Whether torchrun started this process beside others."""
    return dist.is_torchelastic_launched() and os.environ["WORLD_SIZE"] != "1"


@contextmanager
def ranked(program: str, outcome: str) -> Iterator[None]:
    """Join the ranks that torchrun started, where it did. On GPUs each takes its own; where they are too few, raises
    typer.BadParameter. Where another rank ends before this one is done, end the process with status 1 and one line,
    `program: rank 1: another rank ended, outcome`, without what Python does at its end.

    Also a decorator, for a program's main function.
    """
    if not of_several():
        yield
        return
    os.environ.pop("OMP_NUM_THREADS", None)  # torchrun's 1, also for the programs that this one starts
    store, rank, count = next(dist.rendezvous("env://"))
    store.set_timeout(PATIENCE)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=dist.PrefixStore(program, store),  # ranks of `redraft drafter` run programs that are ranks too
        rank=rank,
        world_size=count,
        timeout=PATIENCE,
    )
    try:
        _take_gpu(this_rank())
        yield
    except RuntimeError as error:
        if not _is_lost_peer(error):
            raise
        try:
            print(f"{program}: rank {dist.get_rank()}: another rank ended, {outcome}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        finally:
            os._exit(1)  # Python's own end may wait for a thread of gloo, which waits for the lost rank
    finally:
        dist.destroy_process_group()


def _take_gpu(ranks: Ranks) -> None:
    """Take a GPU of its own, where there are any. Raises typer.BadParameter where its machine has too few."""
    if not torch.cuda.is_available():
        return
    try:
        with ranks.agreement():
            if ranks.local_count > (gpus := torch.cuda.device_count()):
                raise ValueError(
                    f"torchrun --nproc-per-node {ranks.local_count}: expected at most {gpus}, one for each GPU"
                )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def versions() -> str:
    """The versions of what decides the numbers that ranks share."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("redraft", "torch"))


def _first_failure(failures: list[str]) -> str:
    """What the first rank that failed says, with its number unless all say it."""
    if len(set(failures)) == 1:
        return failures[0]
    return next(f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure)


def _difference(facts: list[dict[str, str]]) -> str:
    """The first thing in which ranks differ from rank 0, empty where there is none."""
    for name, value in facts[0].items():
        others = {rank: of_rank[name] for rank, of_rank in enumerate(facts) if of_rank[name] != value}
        if others:
            which = f"rank {next(iter(others))}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
            return f"{which}: other {name} than rank 0: {next(iter(others.values()))}, not {value}"
    return ""


def _is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed: gloo's errors are plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or any(name in str(error) for name in ("gloo", "Gloo", "NCCL"))
