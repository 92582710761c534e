"""What training logs show.

    python -m studies.training curve artifacts/drafters/A artifacts/drafters/B --output learning_curve.png
    python -m studies.training table artifacts/drafters/SPARSE artifacts/drafters/DENSE

`curve` draws what `redraft train` logs: losses compare only runs of one kind of drafter and loss, acceptance compares
all. `table` is Lyanna's table 2: mean acceptance of the first draft steps over training, each given the one before.
A folder may hold a run for each of several seeds, in folders of their own: their mean counts, with its 95% interval.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import Report, console, run
from benchmarks.plots import save
from redraft.loadtest.intervals import over_runs
from redraft.loadtest.plots import COLORS, new_figure
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table

LOG = "log.jsonl"
BY_HOURS = 2
"""The panel that has hours below it."""
Records = list[dict[str, Any]]
Runs = Annotated[list[Path], typer.Argument(help="Output folders of redraft train, or folders of them.")]
app = typer.Typer(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), no_args_is_help=True, rich_markup_mode=None)


def read_log(path: Path) -> Records:
    """Read the records of a run: a folder of a drafter, or its log. Raises ValueError where there is none."""
    file = path / LOG if path.is_dir() else path
    if not file.exists() or not (records := [json.loads(line) for line in file.read_text().splitlines()]):
        raise ValueError(f"{path}: no training log with a record (expected {LOG})")
    return records


def labels_of(paths: list[Path]) -> list[str]:
    """Return the shortest ends of the folders that tell them apart. Raises ValueError for one that is there twice."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    raise ValueError(f"{paths[0]} is given twice")


def hours_of(records: Records) -> list[float]:
    """Hours of training up to each record; where a log has none, from the positions per second of each record."""
    positions = [0, *(record["positions"] for record in records)]
    seconds = [(now - then) / record["rate"] for (then, now), record in zip(pairwise(positions), records, strict=True)]
    return [record.get("hours", total / 3600) for record, total in zip(records, accumulate(seconds), strict=True)]


def plot(runs: Mapping[str, Records], depths: int, path: Path) -> Path:
    """Draw loss, acceptance length, the same by hours, and conditional acceptance at each depth; a line per run."""
    figure, axes = new_figure(3 + depths, height=3.0, columns=2)
    by_depth = [f"Acceptance at depth {depth + 1}" for depth in range(depths)]
    titles = ["Training loss", "Acceptance length, chain", "Acceptance length, chain", *by_depth]
    for index, (label, records) in enumerate(runs.items()):
        line = "-" if index < len(COLORS) else "--"
        style: dict[str, Any] = {"color": COLORS[index % len(COLORS)], "ls": line, "label": label}
        positions, length = ([record[key] for record in records] for key in ("positions", "chain_acceptance_length"))
        acceptance = [[record["conditional_acceptance"][depth] for record in records] for depth in range(depths)]
        curves = [[record["loss"] for record in records], length, length, *acceptance]
        for panel, (axis, curve) in enumerate(zip(axes, curves, strict=True)):
            axis.plot(hours_of(records) if panel == BY_HOURS else np.array(positions) / 1e6, curve, **style)
    for panel, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("hours" if panel == BY_HOURS else "million positions")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 5), frameon=False)
    return save(figure, path)


@app.command()
def curve(
    runs: Runs,
    depths: Annotated[int, typer.Option(help="Depths that get a panel of their own.")] = 3,
    output: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("artifacts/reports/learning_curve.png"),
) -> None:
    """Plot training logs."""
    try:
        logs = dict(zip(labels_of(runs), map(read_log, runs), strict=True))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    logged = min(len(records[0]["conditional_acceptance"]) for records in logs.values())
    console.print(f"written to {plot(logs, min(depths, logged), output)}")


def accuracy(records: Sequence[Mapping[str, Any]], steps: int) -> dict[int, float]:
    """Mean acceptance of the first `steps`, by positions trained. Raises ValueError where fewer steps were drafted."""
    if (least := min(len(record["conditional_acceptance"]) for record in records)) < steps:
        raise ValueError(f"a run logged {least} steps, expected at least {steps}")
    return {record["positions"]: sum(record["conditional_acceptance"][:steps]) / steps for record in records}


def read_run(folder: Path, steps: int) -> dict[int, tuple[float, float | None]]:
    """Read a run, or a folder's runs, one per seed: mean and half the interval by positions of the first, as batches of
    another seed hold a few more or fewer. Raises ValueError where the seeds were not evaluated equally often."""
    logs = sorted(log.parent for log in folder.glob(f"*/{LOG}")) or [folder]
    seeds = [accuracy(read_log(log), steps) for log in logs]
    if len({len(seed) for seed in seeds}) > 1:
        raise ValueError("the seeds of a run were not evaluated equally often")
    columns = zip(*(seed.values() for seed in seeds), strict=True)
    return {count: over_runs(values) for count, values in zip(seeds[0], columns, strict=True)}


def percent(value: float, half: float | None) -> str:
    """A share and half the width of its interval, if it has one."""
    return f"{value:.2%}" + ("" if half is None else f" ±{half:.2%}")


@app.command("table")
def table_2(
    folders: Runs,
    steps: Annotated[int, typer.Option(help="Draft steps that count.")] = 3,
    output: Report = Path("artifacts/reports/token_info_table.json"),
) -> None:
    """Mean acceptance of the first draft steps over training, runs side by side."""
    try:
        runs = {label: read_run(run, steps) for label, run in zip(labels_of(folders), folders, strict=True)}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    shared = sorted(set.intersection(*(set(run) for run in runs.values())))
    table = Table(f"{steps}-step mean acceptance over training", ["positions", *(f"{count:,}" for count in shared)])
    table.rows += [[label, *(percent(*run[count]) for count in shared)] for label, run in runs.items()]
    means, halves = ({label: {n: pair[i] for n, pair in run.items()} for label, run in runs.items()} for i in (0, 1))
    finish(output, {"steps": steps, "runs": means, "intervals": halves}, table)


if __name__ == "__main__":
    run(app)
