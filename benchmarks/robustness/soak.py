"""Load a running service at 80% of what it can take, a fifth of the requests cancelled, and see that nothing wears out.

    redraft serve --bundle BUNDLE
    python -m benchmarks.robustness.soak --run-dir artifacts/run --seconds 1800

A first pass sends each request on its own and keeps its text. A second finds the capacity: requests per second with as
many in flight as there are slots. Then requests arrive at random at --share of that, over all protocols. The exit
status is 1 where one fails, a text differs from the first pass's, a process was restarted, or memory grows.

Only an fp32 bundle gives the same text whatever runs beside it. In another precision texts that differ are counted, and
fail nothing.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer

from benchmarks.command import MaxTokens, Report, console, run
from benchmarks.robustness import service
from redraft.bundle.config import BundleConfig
from redraft.console.progress import progress
from redraft.loadtest.clients.base import Client, Generation, GenerationError
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.serving.rundir import RunDir, State

CAPACITY_S = 20.0
"""How long the capacity is measured."""
SAMPLE_S = 2.0
SETTLED = 0.25
"""The part of the time after which memory counts: before, buffers still grow to what the load needs."""
MOST_GROWTH, MOST_GROWTH_MB = 0.05, 16.0
"""A process may grow by this share in the rest of the time, or by so much."""
MOST_PIECES = 3
"""A cancelled request has had one to so many pieces of its answer."""


@dataclass
class Counts:
    """What became of the requests."""

    whole: int = 0
    cancelled: int = 0
    errors: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    """What each differing text was to be, and was."""


class Memory:
    """Resident memory of each process, in bytes, over time."""

    def __init__(self, state: State):
        self.times: list[float] = []
        self._processes = service.processes(state)
        self.sizes: dict[str, list[int]] = {name: [] for name in self._processes}
        self._begun, self._over = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            try:
                sizes = {name: process.memory_info().rss for name, process in self._processes.items()}
            except psutil.NoSuchProcess:
                return  # restarted: that fails the soak
            self.times.append(time.monotonic() - self._begun)
            for name, size in sizes.items():
                self.sizes[name].append(size)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


@dataclass(frozen=True)
class Growth:
    """How a process's memory changed after it had settled: a straight line through the samples."""

    size_mb: float
    mb_per_hour: float
    grown_mb: float

    @property
    def flat(self) -> bool:
        """Whether it hardly grew."""
        return self.grown_mb <= max(MOST_GROWTH_MB, MOST_GROWTH * self.size_mb)


def growth(times: list[float], sizes: list[int]) -> Growth:
    """The growth that samples show, at least two after the time has settled."""
    settled = [index for index, moment in enumerate(times) if moment >= SETTLED * times[-1]]
    x = np.array([times[index] for index in settled])
    y = np.array([sizes[index] for index in settled]) / 1e6
    slope = float(np.polyfit(x, y, 1)[0]) if len(settled) > 1 else 0.0
    return Growth(float(y.mean()), 3600 * slope, slope * float(x[-1] - x[0]))


async def first_pass(clients: Mapping[str, Client], wanted: list[Generation]) -> list[str]:
    """The text of each request, sent when nothing else runs."""
    names = list(clients)
    return [await service.text(clients[names[index % len(names)]], request) for index, request in enumerate(wanted)]


async def capacity(clients: Mapping[str, Client], wanted: list[Generation], slots: int, seconds: float) -> float:
    """Requests per second with as many in flight as there are slots."""
    ended, begun = 0, time.monotonic()

    async def one_after_the_other(rng: random.Random) -> None:
        nonlocal ended
        while time.monotonic() < begun + seconds:
            await service.text(clients[rng.choice(list(clients))], rng.choice(wanted))
            ended += 1

    await asyncio.gather(*(one_after_the_other(random.Random(f"capacity {slot}")) for slot in range(slots)))
    return ended / (time.monotonic() - begun)


async def soak(
    clients: Mapping[str, Client],
    wanted: list[Generation],
    texts: list[str],
    rate: float,
    seconds: float,
    cancel: float,
) -> Counts:
    """Send requests at random moments for so long, a share of which is cancelled."""
    counts, rng = Counts(), random.Random("soak")

    async def send(index: int, protocol: str, pieces: int | None) -> None:
        try:
            text = await service.text(clients[protocol], wanted[index], pieces)
        except (GenerationError, TimeoutError) as error:
            counts.errors.append(f"{protocol}: {error or 'no answer in time'}")
            return
        if pieces is not None:
            counts.cancelled += 1
            same = texts[index].startswith(text)
        else:
            counts.whole += 1
            same = text == texts[index]
        if not same:
            counts.differing.append(f"{protocol}: expected {texts[index]!r}, got {text!r}")

    begun, due = time.monotonic(), 0.0
    with progress("soak", int(seconds), "s") as bar:
        async with asyncio.TaskGroup() as tasks:
            while (due := due + rng.expovariate(rate)) < seconds:
                await asyncio.sleep(max(begun + due - time.monotonic(), 0.0))
                bar.update(int(time.monotonic() - begun))
                pieces = rng.randint(1, MOST_PIECES) if rng.random() < cancel else None
                tasks.create_task(send(rng.randrange(len(wanted)), rng.choice(list(clients)), pieces))
    return counts


def table(grown: Mapping[str, Growth]) -> Table:
    """One row per process."""
    result = Table("Memory", ["process", "MB", "MB per hour", "grown, MB", "flat"])
    for name, item in grown.items():
        cells = [
            f"{item.size_mb:.0f}",
            f"{item.mb_per_hour:+.1f}",
            f"{item.grown_mb:+.1f}",
            "yes" if item.flat else "no",
        ]
        result.rows.append([name, *cells])
    return result


async def measure(
    state: State, slots: int, prompts: int, tokens: int, share: float, seconds: float, cancel: float
) -> tuple[float, Counts, Memory]:
    """Both passes and the soak: the rate, what became of the requests, and the memory meanwhile."""
    wanted = list(service.generations(prompts, tokens))
    async with service.connected(state.settings) as clients:
        texts = await first_pass(clients, wanted)
        rate = share * await capacity(clients, wanted, slots, min(CAPACITY_S, seconds))
        console.print(f"{rate:.2f} requests per second for {seconds:.0f} s")
        memory = Memory(state)
        try:
            return rate, await soak(clients, wanted, texts, rate, seconds, cancel), memory
        finally:
            memory.stop()


def main(
    run_dir: Annotated[Path, typer.Option(help="Run folder of the service.")] = Path("artifacts/run"),
    seconds: Annotated[float, typer.Option(help="Seconds of load.")] = 1800.0,
    share: Annotated[float, typer.Option(help="Share of the capacity that is asked for.")] = 0.8,
    cancel: Annotated[float, typer.Option(help="Share of the requests that are cancelled.")] = 0.2,
    num_prompts: Annotated[int, typer.Option(help="Different requests.")] = 24,
    tokens: MaxTokens = 64,
    output: Report = Path("artifacts/reports/soak.json"),
) -> int:
    """Returns 1 where something is wrong."""
    before = service.read_state(RunDir(run_dir))
    config = BundleConfig.read(before.settings.bundle)
    slots = config.limits.slots
    rate, counts, memory = asyncio.run(measure(before, slots, num_prompts, tokens, share, seconds, cancel))
    after = RunDir(run_dir).read_state() or before
    parts = [f"{part}_pid" for part in ("worker", "triton", "guard", "openai")]
    restarted = [part.removesuffix("_pid") for part in parts if getattr(after, part) != getattr(before, part)]
    grown = {name: growth(memory.times, sizes) for name, sizes in memory.sizes.items() if sizes}
    exact = config.precision == "fp32"
    console.print(
        f"{counts.whole} whole, {counts.cancelled} cancelled, {len(counts.errors)} errors, {len(counts.differing)} "
        f"differing{'' if exact else f' (which {config.precision} allows)'}; restarted: {restarted or 'nothing'}",
        *counts.errors[:3], *counts.differing[:1], sep="\n", markup=False,
    )  # fmt: skip
    setting = {"seconds": seconds, "share": share, "cancel": cancel, "prompts": num_prompts, "tokens": tokens}
    report = {"bundle": config.name, "precision": config.precision, **setting, "rate": rate, **vars(counts)}
    report |= {"restarted": restarted}
    report |= {"memory": {name: vars(item) | {"flat": item.flat} for name, item in grown.items()}}
    finish(output, report, table(grown))
    grew = not all(item.flat for item in grown.values())
    return int(bool(counts.errors or restarted or grew or (exact and counts.differing)))


if __name__ == "__main__":
    run(main)
