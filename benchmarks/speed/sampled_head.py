"""What sampling the head's rows in the drafters' loss gains and costs: seconds a training step, and how the gradient
points, against the whole head.

    python -m benchmarks.speed.sampled_head artifacts/drafters/A artifacts/drafters/B --model MODEL --data TEACHER
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Annotated
from unittest.mock import patch

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor

from benchmarks.figures.tables import Table
from model_defs.drafters.registry import load_drafter
from model_defs.drafters.windows import Windows
from model_defs.target.model import Target
from training import distillation as training
from training.teacher_data import TeacherData

UNROLL = 5


def timed_gradient(trainer: training.Trainer, windows: Windows, others: int) -> tuple[Tensor, float]:
    """The loss's gradient in all of the drafter's weights with so many sampled rows, and the seconds it took."""
    trainer.drafter.zero_grad()
    started = time.perf_counter()
    with patch.object(training, "OTHER_ROWS", others):
        trainer.loss(windows).backward()
    seconds = time.perf_counter() - started
    return torch.cat([p.grad.flatten() for p in trainer.drafter.parameters() if p.grad is not None]), seconds


def compare(drafter: Path, target: Target, data: list[Path], batches: int) -> list[str]:
    """A row of the table: medians over batches, after one that warms up."""
    module, others = load_drafter(drafter, target).train(), training.OTHER_ROWS
    teacher, recipe = TeacherData(data, 0, module.reads_context), module.recipe
    trainer = training.Trainer(target, module, training.Labels.soft, UNROLL, recipe.hidden_weight)
    rows = []
    for _, windows in zip(range(batches + 1), teacher.batches(recipe.batch, recipe.window, UNROLL, 0), strict=False):
        whole, slow = timed_gradient(trainer, windows, len(trainer.rows))
        sampled, fast = timed_gradient(trainer, windows, others)
        rows.append((slow, fast, F.cosine_similarity(whole, sampled, dim=0).item()))
    slow, fast, cosine = (median(column) for column in zip(*rows[1:], strict=True))
    return [module.name, f"{slow:.3f}", f"{fast:.3f}", f"{slow / fast:.2f}", f"{cosine:.4f}"]


def main(
    drafters: Annotated[list[Path], typer.Argument(help="Folders of drafters.")],
    model: Annotated[Path, typer.Option(help="Target folder written by fetch_model.py.")],
    data: Annotated[list[Path], typer.Option(help="Teacher data written by distill.py.")],
    batches: Annotated[int, typer.Option(help="Batches to take medians over.")] = 7,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Compare the sampled head with the whole one, drafter by drafter."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    target = Target.from_folder(model)
    table = Table(
        f"A training step, {training.OTHER_ROWS} rows besides the labels'",
        ["drafter", "whole head, s", "sampled, s", "speed-up", "cosine of the gradients"],
    )
    table.rows += [compare(drafter, target, data, batches) for drafter in drafters]
    table.show(Console())


if __name__ == "__main__":
    typer.run(main)
