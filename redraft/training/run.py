"""A training run: the loop over teacher data, its checkpoints and its log."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from redraft.console.progress import Progress, duration
from redraft.model_defs.drafters.base import Decay, Drafter
from redraft.model_defs.drafters.hidden_state import HiddenStateDrafter
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.target.model import Target
from redraft.training.distillation import (
    LOGIT_ROWS,
    Checkpoint,
    RunState,
    Trainer,
    learning_rate,
    make_optimizer,
    save_checkpoint,
)
from redraft.training.plan import usual_rows
from redraft.training.ranks import Ranks, this_rank
from redraft.training.teacher_data import SHARDS_AT_ONCE, TeacherData, most_frequent
from redraft.whole_file import whole_file

warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # bfloat16 under autocast, float32 norms

AHEAD = 4
"""Batches that are read before they are needed."""
CHECKPOINT_S = 100.0
"""Seconds after which a checkpoint is written, whatever the step."""
PROGRAM_BYTES = 500_000_000
"""Memory of Python and its libraries."""
TIMED_STEPS = 3
"""Steps after which the run says how long it will take."""


class BatchLoss(torch.nn.Module):
    """A trainer's loss as a module, whose gradients DistributedDataParallel sums."""

    def __init__(self, trainer: Trainer):
        super().__init__()
        self.drafter, self.trainer = trainer.drafter, trainer

    def forward(self, windows: Windows, counts: list[int] | None) -> torch.Tensor:
        """The loss of a piece of a batch, with `counts` those of the whole batch."""
        return self.trainer.loss(windows, counts)


class CheckpointError(ValueError):
    """A checkpoint that the run cannot go on from: of a run with other settings, or one that cannot be read."""


@dataclass(frozen=True)
class Run:
    """How long and in which steps a drafter is trained."""

    positions: int
    window: int
    batch: int
    """Windows of a step, of all ranks together"""
    accumulate: int
    """Pieces of a rank's share of a batch, whose gradients are found one after the other"""
    peak_rate: float
    decay: Decay
    every: int
    seed: int


def settings_of(kind: type[Drafter], texts: list[str], vocab_size: int, device: str) -> dict[str, str]:
    """A drafter's settings by name, from the command's; on a GPU, token info of the usual rows unless they say another.

    Raises ValueError for one that is not name=value.
    """
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (_, equals, _) in zip(texts, pairs, strict=True) if not equals]:
        raise ValueError(f"--set {wrong[0]!r} is not of the form name=value")
    usual = {"info_vocabulary": str(usual_rows(vocab_size, device))} if device == "cuda" else {}
    return (usual if kind is HiddenStateDrafter else {}) | {name: value for name, _, value in pairs}


def prepare_drafter(
    kind: type[Drafter],
    target: Target,
    teacher: TeacherData,
    rows: int,
    settings: dict[str, str],
    start: Path | None,
    resumed: Path | None,
) -> Drafter:
    """The drafter of a run that goes on or starts from another drafter, or a new one."""
    config: Any = kind.configure(target, rows, settings)
    folder = resumed or start
    if folder:
        drafter = load_drafter(folder, target)
        if type(drafter) is not kind:
            raise ValueError(f"{folder} holds a drafter {drafter.name!r}, the command trains one {kind.name!r}")
        if not start and drafter.config != config:
            raise ValueError(f"{folder} holds a drafter of {drafter.config}, the command asks for {config}")
        return drafter.train()
    counts = teacher.count_tokens(target.config.vocab_size)
    ids = most_frequent(counts, rows)
    say(f"hot vocabulary: {rows} tokens cover {counts[ids].sum() / counts.sum():.2%} of the answers")
    return kind(config, target, ids)


def read_ahead(batches: Iterator[Windows], device: torch.device) -> Iterator[tuple[Windows, int]]:
    """The batches on a device, with the positions that they train. For a GPU a thread reads the next ones meanwhile."""
    if device.type == "cpu":
        yield from ((windows, trained(windows)) for windows in batches)
        return
    ready: Queue[tuple[Windows, int] | Exception] = Queue(AHEAD)

    def read() -> None:
        try:
            for windows in batches:
                ready.put((windows.pin_memory() if device.type == "cuda" else windows, trained(windows)))
        except Exception as error:
            ready.put(error)

    Thread(target=read, daemon=True).start()
    while True:
        item = ready.get()
        if isinstance(item, Exception):
            raise item
        yield item[0].to(device), item[1]


def trained(windows: Windows) -> int:
    """How many positions draft a token that their document holds."""
    return int(windows.scored(windows.positions.shape[1], 0).sum())


def train(
    trainer: Trainer,
    teacher: TeacherData,
    run: Run,
    output: Path,
    card: dict[str, str | float | None],
    fresh: bool,
    shown: Progress,
    ranks: Ranks,
) -> None:
    """Train to the end of the run, on all ranks; every `run.every` steps the first one writes a log line, as often and
    after CHECKPOINT_S a checkpoint and the drafter itself. Whatever the ranks, the batches are the same, and so is the
    drafter to rounding, where no sample stands for the head's rows. Raises CheckpointError."""
    drafter, device = trainer.drafter, trainer.device
    optimizer = make_optimizer(drafter, run.peak_rate)
    checkpoint = output / "checkpoint.safetensors"
    recipe = {
        "data": str(teacher),
        "positions": str(run.positions),
        "labels": trainer.labels,
        "hidden weight": str(trainer.hidden_weight),
        "unroll": str(trainer.unroll),
        "window": str(run.window),
        "batch": str(run.batch),
        "peak rate": str(run.peak_rate),
        "decay": run.decay,
        "seed": str(run.seed),
    }
    written = None
    try:
        with ranks.agreement():
            written = Checkpoint.read(checkpoint, recipe) if ranks.first and not fresh else None
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    done = RunState()
    if written := ranks.from_first(written):
        done = written.state
        written.restore(drafter, optimizer)
    if done.step:
        say(f"resumed at step {done.step}, {done.positions} of {run.positions} positions")
    if done.positions >= run.positions:
        say(f"{output} was trained on {done.positions:,} positions already: nothing to do")
    pieces, first = ranks.count * run.accumulate, ranks.index * run.accumulate
    taken = range(first, first + run.accumulate)
    read = teacher.batches(run.batch, run.window, trainer.unroll, run.seed, done.step, pieces, taken)
    batches = read_ahead(read, device)
    begun, losses, saved = replace(done), list[torch.Tensor](), time.monotonic()
    own_positions = 0
    model: torch.nn.Module = BatchLoss(trainer)
    if ranks.count > 1:
        torch.manual_seed(run.seed + ranks.index)  # the samples of the head's rows differ
        model = DistributedDataParallel(model, forward_sync_buffers=False, find_unused_parameters=True)
    shown.begin(done.positions)
    while done.positions < run.positions:
        started = time.monotonic()
        rate = learning_rate(done.positions / run.positions, run.peak_rate, run.decay)
        for group in optimizer.param_groups:
            group["lr"] = rate
        parts = list(islice(batches, run.accumulate))
        own_positions += sum(positions for _, positions in parts)
        positions, counts = totals(trainer, parts, ranks)
        optimizer.zero_grad()
        loss = ranks.sum(backward(model, parts, counts, ranks))
        losses += [loss] if ranks.first else []
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        done.step += 1
        done.positions += positions
        done.seconds += time.monotonic() - started
        seconds = done.seconds - begun.seconds
        speed = (done.positions - begun.positions) / seconds
        shown.update(done.positions, f"step {done.step}")
        if done.step == begun.step + TIMED_STEPS:
            say(f"about {duration((run.positions - done.positions) / speed)} at {speed:,.0f} positions/s")
        ends = done.step % run.every == 0 or done.positions >= run.positions
        trained_by = ranks.gather(own_positions) if ends else []
        if not ranks.first or (not ends and time.monotonic() - saved < CHECKPOINT_S):
            continue
        done.losses += len(losses)
        done.loss += torch.stack(losses).sum().item()
        losses.clear()
        shown.update(done.positions, f"step {done.step}, judging" if ends else None)
        record = judge(trainer, teacher, run, done, speed) if ends else None
        if record:
            done.losses, done.loss = 0, 0.0
            ratio = record.get("acceptance_ratio", 0.0)
            if 0 < ratio < math.inf:
                card["acceptance_ratio"] = ratio  # budgets begin with it
            if ranks.count > 1:
                record["rank_rates"] = [round(positions / seconds) for positions in trained_by]
        drafter.save(output, card)
        save_checkpoint(checkpoint, drafter, optimizer, done, recipe)
        saved = time.monotonic()
        if record:
            log, line = output / "log.jsonl", json.dumps(record)
            with whole_file(log) as file:
                file.write_text((log.read_text() if log.exists() else "") + line + "\n")
            print(line, flush=True)


def totals(trainer: Trainer, parts: Sequence[tuple[Windows, int]], ranks: Ranks) -> tuple[int, list[int] | None]:
    """Positions that a step trains, and those that its loss is the mean over at each depth: those of all ranks' pieces,
    which differ in them. None where there is one piece, which counts them itself."""
    if len(parts) == ranks.count == 1:
        return parts[0][1], None
    rows = [[positions, *trainer.counts(windows)] for windows, positions in parts]
    positions, *counts = ranks.sum(torch.tensor(rows).sum(0)).tolist()
    return positions, counts


def backward(
    model: torch.nn.Module, parts: Sequence[tuple[Windows, int]], counts: list[int] | None, ranks: Ranks
) -> torch.Tensor:
    """Add the gradients of a step's loss, and return this rank's share of the loss. Ranks exchange gradients once, with
    the last piece."""
    total = torch.zeros(())
    for number, (windows, _) in enumerate(parts, 1):
        last = number == len(parts)
        with nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            loss = model(windows, counts)
            (loss * ranks.count).backward()  # DistributedDataParallel takes the mean over ranks
        total = total.to(loss.device) + loss.detach()
    return total


def judge(trainer: Trainer, teacher: TeacherData, run: Run, done: RunState, speed: float) -> dict[str, Any]:
    """A line of the log: how far the run is, its loss since the last line, and acceptance on held-out text if any."""
    record: dict[str, Any] = {
        "drafter": trainer.drafter.name,
        "step": done.step,
        "positions": done.positions,
        "hours": round(done.seconds / 3600, 4),
        "loss": round(done.loss / done.losses, 4),
        "rate": round(speed),
    }
    if teacher.evaluation:
        record |= trainer.evaluate(teacher.held_out(run.window, trainer.unroll))
    record["minutes_left"] = round(max(run.positions - done.positions, 0) / speed / 60, 1)
    return record


def say(text: str) -> None:
    if this_rank().first:
        print(f"train: {text}", file=sys.stderr, flush=True)


def checkpoint_bytes(drafter: Drafter) -> int:
    """Bytes of a drafter's folder: weights and both moments in float32, and the weights in bfloat16."""
    return 14 * sum(weight.numel() for weight in drafter.parameters())


def training_bytes(target: Target, drafter: Drafter, teacher: TeacherData) -> int:
    """Memory of a run: the program, the target, both heads in bfloat16, a block of logits of the whole vocabulary, a
    drafter with gradients and moments in float32, and the shards that are read together, twice while they are cut."""
    shards = sorted((file.stat().st_size for file in teacher.training), reverse=True)
    heads = 2 * (target.lm_head.weight.numel() + 3 * drafter.head_rows.numel())
    logits = 6 * LOGIT_ROWS["cpu"] * target.config.vocab_size
    weights = 4 * sum(weight.numel() for weight in target.parameters())
    trained = 16 * sum(weight.numel() for weight in drafter.parameters())
    return PROGRAM_BYTES + weights + heads + logits + trained + 2 * sum(shards[:SHARDS_AT_ONCE])
