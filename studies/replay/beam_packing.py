"""Rows that the target executes with and without packing, by beam width (ReDrafter, figure 6, left).

    python -m studies.replay.beam_packing --model MODEL --drafter DRAFTER --answers artifacts/answers

Beams are searched along the target's own greedy answers (python -m studies.replay.answers). Without packing each
beam has rows of its own; with it, beams that share a prefix share its rows. The root, one row either way, is not
counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.figures.plots import COLORS, new_figure, save
from benchmarks.figures.results import save_report
from benchmarks.figures.tables import Table, number
from redraft.console.progress import tracked
from redraft.decoding.construction import beams_of
from redraft.decoding.packing import pack_beams
from redraft.model_defs.target.model import Target
from studies.replay.answers import Answer, read
from studies.replay.replay import Outcome, Replayer, roots_of

console = Console()


def packing(replayer: Replayer, answers: Sequence[Answer], width: int, length: int) -> dict[str, Any]:
    """Draft rows per step of beams of a width and length, packed, and what is saved."""
    outcome = Outcome()
    for answer in answers:
        drafts = replayer.draft(answer, width, length)
        outcome.follow(pack_beams(roots_of(answer), *beams_of(drafts, width)), answer.text, length)
    rows, unpacked = np.array(outcome.rows) - 1, width * length
    low, high = np.percentile(rows, [1, 99])
    return {
        "width": width,
        "unpacked": unpacked,
        "packed": float(rows.mean()),
        "p1": float(low),
        "p99": float(high),
        "fewer": 1 - float(rows.mean()) / unpacked,
        "compression": unpacked / float(rows.mean()),
        "acceptance_length": outcome.acceptance_length,
        "steps": len(rows),
    }


def table(results: Sequence[dict[str, Any]]) -> Table:
    """A row per beam width."""
    columns = ["beam width", "rows without", "rows with packing", "1st-99th percentile", "fewer", "accepted"]
    shown = Table("Draft rows that the target executes per step (ReDrafter, figure 6)", columns)
    for row in results:
        percentiles = f"{row['p1']:.0f}-{row['p99']:.0f}"
        figures = [number(row["packed"]), percentiles, f"{row['fewer']:.0%}", number(row["acceptance_length"], 2)]
        shown.rows.append([str(row["width"]), str(row["unpacked"]), *figures])
    return shown


def plot(results: Sequence[dict[str, Any]], path: Path) -> Path:
    """Rows, and the compression ratio, over beam width."""
    figure, (rows, ratio) = new_figure(2)
    width = [row["width"] for row in results]
    rows.plot(width, [row["unpacked"] for row in results], "o-", color=COLORS[0], label="without packing", ms=4)
    rows.plot(width, [row["packed"] for row in results], "o-", color=COLORS[1], label="with packing, mean", ms=4)
    low, high = ([row[key] for row in results] for key in ("p1", "p99"))
    rows.fill_between(width, low, high, color=COLORS[1], alpha=0.15, linewidth=0, label="1st to 99th percentile")
    rows.set_title("Draft rows per step", loc="left")
    ratio.plot(width, [row["compression"] for row in results], "o-", color=COLORS[1], ms=4)
    low, high = ([row["unpacked"] / row[key] for row in results] for key in ("p99", "p1"))
    ratio.fill_between(width, low, high, color=COLORS[1], alpha=0.15, linewidth=0)
    ratio.set_title("Compression ratio", loc="left")
    for axis in (rows, ratio):
        axis.set_xlabel("beam width")
        axis.set_ylim(bottom=0)
    rows.legend(frameon=False, fontsize=8)
    return save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Search beams of every width, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the target, written by redraft fetch")
    add("--drafter", type=Path, required=True, help="folder of the drafter")
    add("--answers", type=Path, default=Path("artifacts/answers"), help="folder written by studies.replay.answers")
    add("--num-prompts", type=int, default=8, help="answers, spread evenly over the folder")
    add("--max-tokens", type=int, default=64, help="of each answer")
    add("--widths", type=int, nargs="+", default=list(range(5, 75, 5)))
    add("--length", type=int, default=5, help="beam length")
    add("--output", type=Path, default=Path("docs/results/beam_packing.json"))
    args = parser.parse_args(argv)
    try:
        answers = read(args.answers, args.num_prompts, args.max_tokens)
        replayer = Replayer.load(args.drafter, Target.from_folder(args.model), args.length)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        parser.error(str(error))
    results = [
        packing(replayer, answers, width, args.length)
        for width in tracked(args.widths, "searching beams", "widths", console)
    ]
    table(results).show(console)
    setting = {"drafter": args.drafter.name, "answers": len(answers), "max_tokens": args.max_tokens}
    save_report(args.output, {**setting, "beam_length": args.length, "widths": results})
    console.print(f"written to {args.output}")


if __name__ == "__main__":
    main()
