#!/usr/bin/env python
"""Train a drafter of any kind on teacher data.

At each position the drafter is unrolled T steps along the teacher's text, and each step is scored against the teacher:
its distribution over the hot vocabulary (soft labels) or the text itself (hard), and, for drafters that predict hidden
states, the teacher's own. Only the drafter is trained. The run is cut into checkpoints; started again with the same
output folder it goes on from the last one.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer

from model_defs.drafters.base import Decay, Drafter
from model_defs.drafters.hidden_state import HiddenStateDrafter
from model_defs.drafters.registry import DRAFTERS, load_drafter
from model_defs.drafters.windows import Windows
from model_defs.files import count_numbers
from model_defs.target.fingerprint import target_fingerprint
from model_defs.target.model import Target
from redraft.chat import template_digest
from redraft.console.interrupt import interruptible
from redraft.console.progress import Progress, duration, progress, size
from redraft.console.resources import free_disk, require_memory
from training.distillation import (
    LOGIT_ROWS,
    Labels,
    RunState,
    Trainer,
    learning_rate,
    make_optimizer,
    restore_checkpoint,
    save_checkpoint,
)
from training.plan import usual_rows
from training.teacher_data import LARGEST_SHARE_HELD_OUT, SHARDS_AT_ONCE, USUAL_HELD_OUT, TeacherData, most_frequent

warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # bfloat16 under autocast, float32 norms

AHEAD = 4
"""Batches that are read before they are needed."""
CHECKPOINT_S = 100.0
"""Seconds after which a checkpoint is written, whatever the step."""
PROGRAM_BYTES = 500_000_000
"""Memory of Python and its libraries."""
TIMED_STEPS = 3
"""Steps after which the run says how long it will take."""
GIVEN = ("hidden_size", "vocab_size", "hot_vocabulary")
SETTINGS = "; ".join(
    f"{name}: " + ", ".join(f"{f.name}={f.default}" for f in fields(kind.config_type) if f.name not in GIVEN)
    for name, kind in DRAFTERS.items()
)


@dataclass(frozen=True)
class Run:
    """How long and in which steps a drafter is trained."""

    positions: int
    window: int
    batch: int
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
    print(f"hot vocabulary: {rows} tokens cover {counts[ids].sum() / counts.sum():.2%} of the answers")
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
        found = ready.get()
        if isinstance(found, Exception):
            raise found
        yield found[0].to(device), found[1]


def trained(windows: Windows) -> int:
    """How many positions draft a token that their document holds."""
    return int(windows.scored(windows.positions.shape[1], 0).sum())


def train(
    trainer: Trainer,
    teacher: TeacherData,
    run: Run,
    output: Path,
    card: dict[str, str | None],
    fresh: bool,
    shown: Progress,
) -> None:
    """Train to the end of the run; every `run.every` steps a log line, as often and after CHECKPOINT_S a checkpoint and
    the drafter itself."""
    drafter, device = trainer.drafter, trainer.device
    optimizer = make_optimizer(drafter, run.peak_rate)
    checkpoint = output / "checkpoint.safetensors"
    recipe = {
        "labels": trainer.labels,
        "hidden weight": str(trainer.hidden_weight),
        "unroll": str(trainer.unroll),
        "window": str(run.window),
        "batch": str(run.batch),
        "peak rate": str(run.peak_rate),
        "decay": run.decay,
        "seed": str(run.seed),
    }
    try:
        done = RunState() if fresh else restore_checkpoint(checkpoint, drafter, optimizer, recipe)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; for these give another --output and --start-from {output}") from None
    if done.step:
        print(f"resumed at step {done.step}, {done.positions} of {run.positions} positions")
    if done.positions >= run.positions:
        say(f"{output} was trained on {done.positions:,} positions already: nothing to do")
    read = teacher.batches(run.batch, run.window, trainer.unroll, run.seed, done.step)
    batches = read_ahead(read, device)
    begun, losses, saved = replace(done), list[torch.Tensor](), time.monotonic()
    shown.begin(done.positions)
    while done.positions < run.positions:
        started = time.monotonic()
        rate = learning_rate(done.positions / run.positions, run.peak_rate, run.decay)
        for group in optimizer.param_groups:
            group["lr"] = rate
        windows, positions = next(batches)
        loss = trainer.loss(windows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        done.step += 1
        done.positions += positions
        done.seconds += time.monotonic() - started
        speed = (done.positions - begun.positions) / (done.seconds - begun.seconds)
        shown.update(done.positions, f"step {done.step}")
        if done.step == begun.step + TIMED_STEPS:
            say(f"about {duration((run.positions - done.positions) / speed)} at {speed:,.0f} positions/s")
        ends = done.step % run.every == 0 or done.positions >= run.positions
        if not ends and time.monotonic() - saved < CHECKPOINT_S:
            continue
        done.losses += len(losses)
        done.loss += torch.stack(losses).sum().item()
        losses.clear()
        shown.update(done.positions, f"step {done.step}, judging" if ends else None)
        record = judge(trainer, teacher, run, done, speed) if ends else None
        if record:
            done.losses, done.loss = 0, 0.0
        drafter.save(output, card)
        save_checkpoint(checkpoint, drafter, optimizer, done, recipe)
        saved = time.monotonic()
        if record:
            with (output / "log.jsonl").open("a") as file:
                print(json.dumps(record), file=file)
            print(json.dumps(record), flush=True)


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
    print(f"train_drafter: {text}", file=sys.stderr, flush=True)


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


@interruptible("train_drafter", "the same command goes on from the last checkpoint")
def main(
    model: Annotated[Path, typer.Option(help="Target folder written by fetch_model.py.")],
    data: Annotated[list[Path], typer.Option(help="Teacher data written by distill.py; may be given several times.")],
    output: Annotated[Path, typer.Option(help="Folder for the drafter, its checkpoint and its log.")],
    drafter: Annotated[str, typer.Option(help=f"Kind of drafter: {', '.join(DRAFTERS)}.")] = "recurrent",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help=f"A setting of the drafter, name=value; may be given several times. {SETTINGS}."),
    ] = None,
    start_from: Annotated[Path | None, typer.Option(help="A trained drafter to go on from; its shape is kept.")] = None,
    positions: Annotated[
        int, typer.Option(min=1, help="Positions to train on; the learning rate decays over them.")
    ] = 5_000_000,
    labels: Annotated[Labels, typer.Option(help="Teacher distributions, or the text itself.")] = Labels.soft,
    hidden_weight: Annotated[
        float | None, typer.Option(help="Weight of the hidden states' squared error; default: the drafter's.")
    ] = None,
    hot_vocabulary: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Head rows: the K most frequent tokens; 0 is all. Default: 12288; on a GPU 32768, or all of "
            "up to 40,000. There these are info_vocabulary's default too, whatever the head has.",
            show_default=False,
        ),
    ] = None,
    unroll: Annotated[int, typer.Option(min=1, help="Drafting steps T in the loss.")] = 5,
    window: Annotated[
        int | None, typer.Option(min=1, help="Consecutive positions per window; default: the drafter's.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Windows per step; default: the drafter's.")] = None,
    peak_rate: Annotated[float | None, typer.Option(help="Peak learning rate (Adam); default: the drafter's.")] = None,
    decay: Annotated[Decay | None, typer.Option(help="Of the learning rate; default: the drafter's.")] = None,
    held_out: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Shards to judge by: of distill.py --held-out where given, else of --data. Default: "
            f"{USUAL_HELD_OUT}, of --data at most {LARGEST_SHARE_HELD_OUT:.0%} of the shards.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        int, typer.Option(min=1, help=f"Steps between evaluations; a checkpoint comes every {CHECKPOINT_S:.0f} s too.")
    ] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the data order and the weights.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 is torch's default.")] = 0,
) -> None:
    """Train a drafter by distillation; resumes when the output folder has a checkpoint."""
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if drafter not in DRAFTERS:
        raise typer.BadParameter(f"unknown drafter {drafter!r}; known are {', '.join(DRAFTERS)}")
    kind = DRAFTERS[drafter]
    recipe = kind.recipe
    run = Run(
        positions,
        window or recipe.window,
        batch or recipe.batch,
        peak_rate or recipe.peak_rate,
        decay or recipe.decay,
        every,
        seed,
    )
    resumed = output if (output / "checkpoint.safetensors").exists() else None
    with progress("train_drafter", positions, "positions", "loading the target") as shown:
        try:
            teacher = TeacherData(data, held_out, kind.reads_context)
            teacher.require(run.batch, run.window, unroll)
            require_memory(4 * count_numbers(model), "training beside the target")
            target = Target.from_folder(model).to(device)
            vocab_size = target.config.vocab_size
            chosen = usual_rows(vocab_size, device.type) if hot_vocabulary is None else hot_vocabulary or vocab_size
            given = settings_of(kind, settings or [], vocab_size, device.type)
            rows = min(chosen, vocab_size)
            module = prepare_drafter(kind, target, teacher, rows, given, start_from, resumed).to(device)
            module.require_steps(unroll)
            disk, memory = checkpoint_bytes(module), training_bytes(target, module, teacher)
            if disk > (free := free_disk(output)):
                raise ValueError(f"{output} takes {size(disk)}, and {size(free)} of its disk are free")
            require_memory(memory, "training")
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None
        shards = len(teacher.training)
        judged = (
            f"{len(teacher.evaluation)} held out to judge by" if teacher.evaluation else "none to judge by: too few"
        )
        say(f"{drafter} drafter on {shards} shards of teacher data, {judged}")
        say(f"{positions:,} positions; about {size(memory)} of memory and {size(disk)} of disk at {output}")
        output.mkdir(parents=True, exist_ok=True)
        loss_weight = recipe.hidden_weight if hidden_weight is None else hidden_weight
        trainer = Trainer(target, module, labels, unroll, loss_weight)
        if not resumed and not start_from:
            shown.update(0, "setting the first weights")
            module.initialize(target, teacher.sample(run.window, unroll).to(device))
        card = {"target_fingerprint": target_fingerprint(target), "chat_template": template_digest(model)}
        train(trainer, teacher, run, output, card, resumed is None, shown)


if __name__ == "__main__":
    typer.run(main)
