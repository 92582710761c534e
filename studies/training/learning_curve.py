"""Learning curves of drafters: loss and acceptance on held-out text against the positions that they were trained on,
and acceptance against the hours that it took.

    python -m studies.training.learning_curve artifacts/drafters/A artifacts/drafters/B --output learning_curve.png

Reads what redraft train logs. Losses compare only runs of one kind of drafter and loss (ablations); acceptance
compares all.
"""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.figures.plots import COLORS, new_figure, save
from benchmarks.figures.tables import rates

LOG = "log.jsonl"
BY_HOURS = 2
"""The panel that has hours below it."""
out = Console(highlight=False)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a run: a folder of a drafter or its log. Raises ValueError where there is none."""
    file = path / LOG if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"{path}: no training log (expected {LOG})")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    if not records:
        raise ValueError(f"{file} holds no record yet")
    return records


def labels_of(paths: list[Path]) -> list[str]:
    """The shortest ends of the runs' folders that tell them apart."""
    paths = [path.parent if path.suffix == ".jsonl" else path for path in paths]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    raise ValueError(f"{paths[0]} is given twice")


def hours_of(records: list[dict[str, Any]]) -> list[float]:
    """Hours of training up to each record; where a log has none, from the positions per second of each record."""
    positions = [0, *(record["positions"] for record in records)]
    seconds = [(now - then) / record["rate"] for (then, now), record in zip(pairwise(positions), records, strict=True)]
    return [record.get("hours", total / 3600) for record, total in zip(records, accumulate(seconds), strict=True)]


def plot(runs: dict[str, list[dict[str, Any]]], depths: int, path: Path) -> Path:
    """Panels: loss, acceptance length, the same by hours, and conditional acceptance at each depth; a line per run."""
    figure, axes = new_figure(3 + depths, height=3.0, columns=2)
    by_depth = [f"Acceptance at depth {depth + 1}" for depth in range(depths)]
    titles = ["Training loss", "Acceptance length, chain", "Acceptance length, chain", *by_depth]
    for index, (label, records) in enumerate(runs.items()):
        style: dict[str, Any] = {
            "color": COLORS[index % len(COLORS)],
            "ls": "-" if index < len(COLORS) else "--",
            "label": label,
        }
        positions, length = ([record[key] for record in records] for key in ("positions", "chain_acceptance_length"))
        acceptance = [[record["conditional_acceptance"][depth] for record in records] for depth in range(depths)]
        curves = [[record["loss"] for record in records], length, length, *acceptance]
        for place, (axis, curve) in enumerate(zip(axes, curves, strict=True)):
            axis.plot(hours_of(records) if place == BY_HOURS else np.array(positions) / 1e6, curve, **style)
    for place, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("hours" if place == BY_HOURS else "million positions")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 5), frameon=False)
    return save(figure, path)


def summary(runs: dict[str, list[dict[str, Any]]]) -> Table:
    """The last record of each run."""
    table = Table(
        "run", "positions", "hours", "rate", "loss", "acceptance", "conditional, by depth", title="Last record"
    )
    for label, records in runs.items():
        last = records[-1]
        table.add_row(
            label,
            f"{last['positions']:,}",
            f"{last['hours']:.2f}" if "hours" in last else "",
            f"{last['rate']}",
            f"{last['loss']:.3f}",
            f"{last['chain_acceptance_length']:.3f}",
            rates(last["conditional_acceptance"]),
        )
    return table


def main(
    runs: Annotated[list[Path], typer.Argument(help="Folders of drafters, or their logs.")],
    output: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("artifacts/reports/learning_curve.png"),
    depths: Annotated[int, typer.Option(help="Depths that get a panel of their own.")] = 3,
) -> None:
    """Plot training logs, and print where each run ended."""
    try:
        logs = dict(zip(labels_of(runs), map(read_log, runs), strict=True))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    known = min(len(records[0]["conditional_acceptance"]) for records in logs.values())
    out.print(summary(logs))
    out.print(f"wrote {plot(logs, min(depths, known), output)}")


if __name__ == "__main__":
    typer.run(main)
