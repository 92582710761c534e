"""Acceptance of drafters on conversations that were kept from training, side by side: what redraft train logs,
of drafters as they are.

    python -m benchmarks.verify.held_out drafters/SmolLM2-135M-Instruct* --model MODEL --data TEACHER

On a GPU where there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import ModelFolder, Report, run
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table, rates
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.target.model import Target
from redraft.training.distillation import Labels, Trainer
from redraft.training.teacher_data import TeacherData


def judge(folder: Path, target: Target, data: list[Path], held_out: int, unroll: int) -> dict[str, Any]:
    """Greedy acceptance of a drafter's chain on held-out shards (see `TeacherData`), on the target's device."""
    drafter = load_drafter(folder, target).to(target.embedding.weight.device)
    teacher = TeacherData(data, held_out, drafter.reads_context)
    trainer = Trainer(target, drafter, Labels.soft, unroll, drafter.recipe.hidden_weight)
    weights = sum(weight.numel() for weight in drafter.parameters())
    figures = trainer.evaluate(teacher.held_out(drafter.recipe.window, unroll))
    return {"folder": str(folder), "drafter": drafter.name, "parameters": weights, **figures}


def row(found: dict[str, Any]) -> list[str]:
    """One drafter's row of the table."""
    length, by_depth = found["chain_acceptance_length"], rates(found["conditional_acceptance"])
    return [found["drafter"], f"{found['parameters'] / 1e6:.1f}M", f"{length:.2f}", by_depth, found["folder"]]


def main(
    drafters: Annotated[list[Path], typer.Argument(help="Folders of drafters.")],
    model: ModelFolder,
    data: Annotated[list[Path], typer.Option(help="Teacher data written by redraft distill.")],
    held_out: Annotated[
        int, typer.Option("--held-out-shards", min=1, help="Shards to judge by, which were kept from training.")
    ] = 2,
    unroll: Annotated[int, typer.Option(help="Tokens that a chain drafts.")] = 5,
    output: Report = Path("artifacts/reports/held_out.json"),
) -> None:
    target = Target.from_folder(model).to("cuda" if torch.cuda.is_available() else "cpu")
    try:
        judged = [judge(drafter, target, data, held_out, unroll) for drafter in drafters]
    except (ValueError, OSError, KeyError) as error:
        raise typer.BadParameter(str(error)) from None
    title, by_depth = f"Chains of {unroll} on held-out conversations", f"conditional acceptance, depths 1-{unroll}"
    table = Table(title, ["drafter", "parameters", "tokens per step", by_depth, "folder"])
    table.rows += map(row, judged)
    finish(output, {"rows": judged}, table)


if __name__ == "__main__":
    run(main)
