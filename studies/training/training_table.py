"""Mean acceptance of the first draft steps on held-out text over training, runs side by side (Lyanna, table 2).

    python -m studies.training.training_table artifacts/drafters/SPARSE artifacts/drafters/DENSE

Reads what redraft train logs: greedy acceptance of a chain, each step given the one before. Table 2 compares
token info of the most frequent tokens with token info of all; train both alike but for --set info_vocabulary. A folder
may hold a run for each of several seeds, in folders of their own: their mean counts, with its 95% interval over seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.figures.intervals import over_runs
from benchmarks.figures.results import save_report
from benchmarks.figures.tables import Table
from studies.training.learning_curve import LOG, labels_of, read_log

console = Console()


def accuracy(records: Sequence[Mapping[str, Any]], steps: int) -> dict[int, float]:
    """Mean acceptance of the first `steps`, by positions trained. Raises ValueError where fewer steps were drafted."""
    if (least := min(len(record["conditional_acceptance"]) for record in records)) < steps:
        raise ValueError(f"a run logged {least} steps, expected at least {steps}")
    return {record["positions"]: sum(record["conditional_acceptance"][:steps]) / steps for record in records}


Run = Mapping[int, tuple[float, float | None]]
"""Mean over seeds and half the width of its interval, None for one seed, by positions trained."""


def over_seeds(seeds: Sequence[Mapping[int, float]]) -> dict[int, tuple[float, float | None]]:
    """A run of several seeds, by the first one's positions: batches of another seed hold a few more or fewer. Raises
    ValueError where they were not evaluated equally often."""
    if len({len(seed) for seed in seeds}) > 1:
        raise ValueError("the seeds of a run were not evaluated equally often")
    columns = zip(*(seed.values() for seed in seeds), strict=True)
    return {count: over_runs(values) for count, values in zip(seeds[0], columns, strict=True)}


def read_run(folder: Path, steps: int) -> dict[int, tuple[float, float | None]]:
    """The run of a folder, or of the folders in it, one for each seed. Raises ValueError."""
    seeds = sorted(log.parent for log in folder.glob(f"*/{LOG}")) or [folder]
    return over_seeds([accuracy(read_log(seed), steps) for seed in seeds])


def table(runs: Mapping[str, Run], steps: int) -> Table:
    """A row per run, a column for each evaluation that all have, and what the first run is ahead.

    Raises ValueError where they have none in common.
    """
    shared = sorted(set.intersection(*(set(run) for run in runs.values())))
    if not shared:
        raise ValueError("the runs have no evaluation at the same number of positions")
    shown = Table(f"{steps}-step mean acceptance over training", ["positions", *(f"{count:,}" for count in shared)])
    for label, run in runs.items():
        shown.rows.append([label, *(percent(*run[count]) for count in shared)])
    (first, ahead), *others = runs.items()
    for label, run in others:
        gains = (f"{100 * (ahead[count][0] - run[count][0]):+.2f}" for count in shared)
        shown.rows.append([f"{first} over {label}, points", *gains])
    return shown


def percent(value: float, half: float | None) -> str:
    """A share and half the width of its interval, if it has one."""
    return f"{value:.2%}" + ("" if half is None else f" ±{half:.2%}")


def main(argv: list[str] | None = None) -> None:
    """Print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", help="output folders of redraft train, or folders of them")
    add("--steps", type=int, default=3)
    add("--output", type=Path, default=Path("docs/results/training_table.json"))
    args = parser.parse_args(argv)
    try:
        labels = labels_of(args.runs)
        runs = {label: read_run(run, args.steps) for label, run in zip(labels, args.runs, strict=True)}
        table(runs, args.steps).show(console)
    except ValueError as error:
        parser.error(str(error))
    means, halves = ({label: {n: pair[i] for n, pair in run.items()} for label, run in runs.items()} for i in (0, 1))
    save_report(args.output, {"steps": args.steps, "runs": means, "intervals": halves})
    console.print(f"written to {args.output}")


if __name__ == "__main__":
    main()
