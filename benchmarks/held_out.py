"""Acceptance of drafters on conversations that were kept from training, side by side: what build/train_drafter.py logs,
of drafters as they are.

    python -m benchmarks.held_out drafters/* --model MODEL --data TEACHER
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.tables import Table, rates
from model_defs.drafters import load_drafter
from model_defs.target import Target
from model_defs.training import Labels, Trainer
from model_defs.windows import TeacherData


def judged(drafter: Path, target: Target, data: list[Path], held_out: int, unroll: int) -> list[str]:
    """A row of the table: greedy acceptance of a chain on the first shards of the first folder."""
    module = load_drafter(drafter, target)
    teacher = TeacherData(data, held_out, module.reads_context)
    trainer = Trainer(target, module, Labels.soft, unroll, module.recipe.hidden_weight)
    found = trainer.evaluate(teacher.held_out(module.recipe.window, unroll))
    by_depth = rates(found["conditional_acceptance"])
    weights = sum(weight.numel() for weight in module.parameters())
    return [module.name, f"{weights / 1e6:.1f}M", f"{found['chain_acceptance_length']:.2f}", by_depth]


def main(
    drafters: Annotated[list[Path], typer.Argument(help="Folders of drafters.")],
    model: Annotated[Path, typer.Option(help="Target folder written by fetch_model.py.")],
    data: Annotated[list[Path], typer.Option(help="Teacher data written by distill.py.")],
    held_out: Annotated[int, typer.Option(help="Shards that were kept from training.")] = 2,
    unroll: Annotated[int, typer.Option(help="Tokens that a chain drafts.")] = 5,
) -> None:
    """Judge drafters on held-out conversations."""
    target = Target.from_folder(model)
    title = f"Chains of {unroll} on held-out conversations"
    table = Table(title, ["drafter", "parameters", "tokens per step", f"conditional acceptance, depths 1-{unroll}"])
    try:
        table.rows += [judged(drafter, target, data, held_out, unroll) for drafter in drafters]
    except (ValueError, OSError, KeyError) as error:
        raise typer.BadParameter(str(error)) from None
    table.show(Console())


if __name__ == "__main__":
    typer.run(main)
