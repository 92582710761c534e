"""A generation of a drafter: the answers that it is trained on and judged by, and how it is judged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from redraft.learning.generations import Measure
from redraft.learning.shard_file import FINGERPRINT, PROMPTS, SHARDS, link_or_copy
from redraft.loadtest.intervals import interval, ratio
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.files import save_tensors
from redraft.model_defs.target.model import Target
from redraft.training.distillation import Labels, Trainer
from redraft.training.teacher_data import TeacherData, prompt_hashes

HELD_OUT_SHARE = 0.15
"""Share of the answers, the newest, that a generation is judged by."""
MOST_JUDGED = 256
"""Answers that a generation is judged by at most."""
FEWEST_JUDGED = 16
"""Answers to fewer prompts say too little."""
UNROLL = 5
"""Drafting steps that are trained and judged."""
TRAINED, JUDGED = "trained", "judged"
"""Folders of a generation: the shards that it is trained on, and those that it is judged by."""
BEGUN, CHECKPOINT = "begun.json", "checkpoint.safetensors"
"""Files of a generation that is being made: what it was begun with, and how far its training is."""


class TooFewError(ValueError):
    """Too few answers to train on or to judge by."""


@dataclass(frozen=True)
class Order:
    """What `redraft learn` is to make a generation of."""

    kind: type[Drafter]
    """Kind of the drafter"""
    settings: Sequence[str]
    """The settings of the training: with others, no training goes on"""
    fingerprint: str | None = None
    """Of the target; None: of any"""
    mix: Sequence[Path] = ()
    """Teacher data to train on beside the answers"""


def goes_on(generation: Path, order: Order) -> bool:
    """Whether the training of a generation can go on: it was begun by the same order, has a checkpoint, and still has
    all the answers that were set apart and the same data to mix in."""
    try:
        begun = json.loads((generation / BEGUN).read_bytes())
    except (OSError, ValueError):
        return False
    return (generation / CHECKPOINT).is_file() and begun == _begun(generation, order)


def _begun(generation: Path, order: Order) -> dict[str, object]:
    """What the file says of a generation that begins with the answers of its folders."""
    answers = {
        f"{name}/{file.name}": file.stat().st_size
        for name in (TRAINED, JUDGED)
        for file in sorted((generation / name).glob(SHARDS))
    }
    mix = {str(file): file.stat().st_size for folder in order.mix for file in sorted(folder.glob(SHARDS))}
    return {"settings": list(order.settings), "answers": answers, "mix": mix}


def set_apart(learned: Path, generation: Path, order: Order, say: Callable[[str], None]) -> None:
    """Fix what a generation is trained on and judged by, whatever is served meanwhile: the newest answers of a folder
    of served ones are judged by, the others are trained on. No training reads an answer to the same prompt as one that
    is judged by. The folder appears whole or not at all; one that is there gives way to it. `say` is told which shards
    are left out: those that cannot be read, or are of another target.

    Raises ValueError where there are too few answers, OSError.
    """
    if not learned.is_dir():
        raise ValueError(f"{learned} is not a folder: `redraft serve --learn` makes one, and stores answers in it")
    partial = generation.with_name(f".{generation.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name in (TRAINED, JUDGED):
        (partial / name).mkdir(mode=0o700, parents=True)
    try:
        for file in learned.glob(SHARDS):
            with suppress(FileNotFoundError):  # a service has removed it since, as too old or too much
                link_or_copy(file, partial / TRAINED / file.name)
        counts = _usable(partial / TRAINED, order.fingerprint, say)
        try:
            _divide(partial, counts)
            _require(partial, order)
        except TooFewError:
            held = f"{learned} holds {sum(counts.values())} answers in {len(counts)} shards"
            few = f"{held}, too few, or to too few prompts, to train on and to judge by: serve more"
            raise ValueError(few) from None
        (partial / BEGUN).write_text(json.dumps(_begun(partial, order)), encoding="utf-8")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if generation.exists():
        (generation / CHECKPOINT).unlink(missing_ok=True)  # first: without it nothing goes on with the rest
        shutil.rmtree(generation)
    partial.replace(generation)


def _divide(partial: Path, counts: dict[Path, int]) -> None:
    """Move the newest answers of shards, the oldest first, to those that are judged by: their share, and on to
    FEWEST_JUDGED prompts. Raises TooFewError where MOST_JUDGED answers, or all, do not reach that."""
    newest = [prompt for file in reversed(counts) for prompt in reversed(prompt_hashes(file))]
    held_out = min(max(FEWEST_JUDGED, int(HELD_OUT_SHARE * len(newest))), MOST_JUDGED)
    while len({*newest[:held_out]}) < FEWEST_JUDGED:
        if held_out >= min(len(newest), MOST_JUDGED):
            raise TooFewError
        held_out += 1
    for file, count in reversed(counts.items()):
        judged = min(count, held_out)
        held_out -= judged
        if judged:
            _copy(file, partial / JUDGED / file.name, slice(count - judged, count), {"held_out": "1"})
        if 0 < judged < count:
            _copy(file, file, slice(count - judged))
        elif judged:
            file.unlink()


def _require(partial: Path, order: Order) -> None:
    """Raises TooFewError unless there is a batch of windows to train on; ValueError where the data to mix in do not go
    with them."""
    if not any((partial / TRAINED).iterdir()):
        raise TooFewError
    data = TeacherData([partial / TRAINED, partial / JUDGED, *order.mix], None, order.kind.reads_context)
    try:
        data.require(order.kind.recipe.batch, order.kind.recipe.window, UNROLL)
    except ValueError:
        raise TooFewError from None


def _usable(folder: Path, fingerprint: str | None, say: Callable[[str], None]) -> dict[Path, int]:
    """The shards of a folder of served answers that can be trained on, the oldest first, with their answers. The others
    are removed from it."""
    counts: dict[Path, int] = {}
    others = 0
    for file in sorted(folder.glob(SHARDS)):
        try:
            with safe_open(file, framework="pt") as shard:
                offsets, rows = shard.get_tensor("offsets"), len(shard.get_tensor("tokens"))
                states = shard.get_slice("hidden").get_shape()[0]
                each = {len(shard.get_tensor(name)) for name in ("answer_starts", PROMPTS)}
                target = (shard.metadata() or {}).get(FINGERPRINT)
        except (OSError, SafetensorError) as error:
            say(f"{file.name} is left out: it cannot be read ({error})")
            file.unlink()
            continue
        if (
            len(offsets) < 2
            or not (offsets.diff() > 0).all()
            or offsets[[0, -1]].tolist() != [0, rows]
            or states != rows
            or each != {len(offsets) - 1}
        ):
            say(f"{file.name} is left out: its answers are damaged")
            file.unlink()
        elif fingerprint and target not in (None, fingerprint):
            others += 1
            file.unlink()
        else:
            counts[file] = len(offsets) - 1
    if others:
        say(f"{others} shards are left out: their answers are another target's")
    return counts


def count_answers(generation: Path, order: Order) -> int:
    """How many of the answers that were set apart are trained on: not those to prompts that others are judged by."""
    data = TeacherData([generation / TRAINED, generation / JUDGED], None, order.kind.reads_context)
    return data.count_answers()


def _copy(source: Path, target: Path, answers: slice, metadata: Mapping[str, str] | None = None) -> None:
    """Copy some answers of a served shard, maybe to its own name, and say more in its metadata."""
    stat = source.stat()
    with safe_open(source, framework="pt") as shard:
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        known = shard.metadata() or {}
    starts, ends = tensors["offsets"][:-1][answers], tensors["offsets"][1:][answers]
    rows = slice(int(starts[0]), int(ends[-1]))
    tensors = {
        name: tensor[rows] if name in ("tokens", "hidden") else tensor[answers] for name, tensor in tensors.items()
    }
    tensors["answer_starts"] = tensors["answer_starts"] - rows.start
    tensors["offsets"] = torch.cat([starts, ends[-1:]]) - rows.start
    save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, target, {**known, **(metadata or {})})
    target.chmod(0o600)
    os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # it is removed when the served one is


def remove_answers(generation: Path) -> None:
    """Remove the answers of a generation that is complete, and what only a run that goes on needs."""
    for name in (TRAINED, JUDGED):
        shutil.rmtree(generation / name, ignore_errors=True)
    for name in (CHECKPOINT, BEGUN):
        (generation / name).unlink(missing_ok=True)


@torch.no_grad()
def judge(
    target: Target,
    drafters: Sequence[Path],
    judged: Path,
    wait: Callable[[], None] = lambda: None,
    unroll: int = UNROLL,
) -> Measure:
    """Compare two drafters, the one before and the one after, on the answers of a folder; `wait` is called before each
    of them. Raises ValueError where one does not fit the target."""
    (prompts, before), (_, after) = (_accepted(target, folder, judged, wait, unroll) for folder in drafters)
    # Answers to one prompt may be the same to the letter: they are one sample, the mean, however often it was asked.
    ids, of, asked = np.unique(prompts, return_inverse=True, return_counts=True)
    means = [np.zeros((len(ids), 2)) for _ in drafters]
    for each, drafts in zip(means, (before, after), strict=True):
        np.add.at(each, of, drafts)
        each /= asked[:, None]
    low, high = interval(np.subtract(*(ratio(each[:, 1], each[:, 0]) for each in reversed(means))))
    length_before, length = (1 + float(each[:, 1].sum() / each[:, 0].sum()) for each in means)
    return Measure(
        answers=len(prompts),
        length_before=round(length_before, 4),
        length=round(length, 4),
        gain_low=round(low, 4),
        gain_high=round(high, 4),
    )


def _accepted(
    target: Target, folder: Path, judged: Path, wait: Callable[[], None], unroll: int
) -> tuple[list[int], np.ndarray]:
    """Each answer's prompt, by its hash, and the drafts that begin in it and their accepted tokens, float64
    [answers, 2]."""
    drafter = load_drafter(folder, target).to(target.embedding.weight.device).eval()
    trainer = Trainer(target, drafter, Labels.soft, unroll, 0.0)
    data = TeacherData([judged], MOST_JUDGED, drafter.reads_context)
    prompts, drafts = [], []
    for prompt, windows in data.held_out_answers(drafter.recipe.window, unroll, MOST_JUDGED):
        wait()
        prompts.append(prompt)
        drafts.append(trainer.accepted(windows))
    return prompts, np.array(drafts, np.float64)
