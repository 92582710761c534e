"""A generation of a drafter: the answers that it is trained on and judged by, and how it is judged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from redraft.learning.generations import Measure
from redraft.learning.shard_file import SHARDS
from redraft.loadtest.intervals import interval, ratio
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.files import save_tensors
from redraft.model_defs.target.model import Target
from redraft.training.distillation import Labels, Trainer
from redraft.training.teacher_data import TeacherData

HELD_OUT_SHARE = 0.15
"""Share of the answers, the newest, that a generation is judged by."""
MOST_JUDGED = 256
"""Answers that a generation is judged by at most."""
FEWEST_JUDGED = 16
"""Fewer answers say too little."""
TRAINED, JUDGED = "trained", "judged"
"""Folders of a generation: the shards that it is trained on, and those that it is judged by."""


def set_apart(learned: Path, generation: Path) -> None:
    """Fix what a generation is trained on and judged by, whatever is served or removed meanwhile: the newest answers of
    a folder of served ones are judged by, the others are trained on. No training reads an answer to the same prompt as
    one that is judged by. The folder appears whole or not at all.

    Raises ValueError where there are too few answers, OSError.
    """
    files = sorted(learned.glob(SHARDS))
    counts = {file: count_answers(file) for file in files}
    wanted = min(HELD_OUT_SHARE * sum(counts.values()), MOST_JUDGED)
    newest: list[Path] = []
    for file in reversed(files[1:]):
        if sum(counts[kept] for kept in newest) >= max(wanted, FEWEST_JUDGED):
            break
        newest.append(file)
    if sum(counts[file] for file in newest) < FEWEST_JUDGED:
        raise ValueError(
            f"{learned} holds {sum(counts.values())} answers in {len(files)} shards, too few to train on and to judge "
            "by: serve more"
        )
    partial = generation.with_name(f".{generation.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name in (TRAINED, JUDGED):
        (partial / name).mkdir(mode=0o700, parents=True)
    for file in files:
        if file in newest:
            _hold_out(file, partial / JUDGED / file.name)
        else:
            (partial / TRAINED / file.name).hardlink_to(file)
    partial.replace(generation)


def count_answers(file: Path) -> int:
    """How many answers a shard holds."""
    with safe_open(file, framework="pt") as shard:
        return int(shard.get_slice("answer_starts").get_shape()[0])


def _hold_out(source: Path, target: Path) -> None:
    """Copy a shard as one that no training reads."""
    with safe_open(source, framework="pt") as shard:
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        metadata = shard.metadata() or {}
    save_tensors(tensors, target, metadata | {"held_out": "1"})
    target.chmod(0o600)
    stat = source.stat()
    os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # it is removed when the served one is


def remove_answers(generation: Path) -> None:
    """Remove the answers of a generation that is complete, and what only a run that goes on needs."""
    for name in (TRAINED, JUDGED):
        shutil.rmtree(generation / name, ignore_errors=True)
    (generation / "checkpoint.safetensors").unlink(missing_ok=True)


@torch.no_grad()
def judge(target: Target, drafters: Sequence[Path], judged: Path, unroll: int = 5) -> Measure:
    """Compare two drafters, the one before and the one after, on the answers of a folder. Raises ValueError where one
    does not fit the target."""
    before, after = (_accepted(target, folder, judged, unroll) for folder in drafters)
    lengths = [1 + ratio(drafts[:, 1], drafts[:, 0]) for drafts in (before, after)]
    low, high = interval(lengths[1] - lengths[0])
    length_before, length = (1 + float(drafts[:, 1].sum() / drafts[:, 0].sum()) for drafts in (before, after))
    return Measure(
        answers=len(before),
        length_before=round(length_before, 4),
        length=round(length, 4),
        gain_low=round(low, 4),
        gain_high=round(high, 4),
    )


def _accepted(target: Target, folder: Path, judged: Path, unroll: int) -> np.ndarray:
    """Of each answer the drafts that begin in it and their accepted tokens, float64 [answers, 2]."""
    drafter = load_drafter(folder, target).to(target.embedding.weight.device).eval()
    trainer = Trainer(target, drafter, Labels.soft, unroll, 0.0)
    data = TeacherData([judged], MOST_JUDGED, drafter.reads_context)
    windows = data.held_out_answers(drafter.recipe.window, unroll, MOST_JUDGED)
    return np.array([trainer.accepted(each) for each in windows], np.float64)
