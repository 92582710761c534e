"""Acceptance length by beam width and length, of one drafter or several (ReDrafter, figure 7, tables 5 and 6).

    python -m studies.replay.beam_shapes --model MODEL --drafters DRAFTER --answers artifacts/answers
    python -m studies.replay.beam_shapes ... --drafters DISTILLED UNDISTILLED --lengths 5     # table 6

Every width is a beam search of its own along the target's greedy answers (python -m studies.replay.answers);
shorter beams are its first levels. Acceptance length counts the bonus token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.figures.plots import lines, new_figure, save
from benchmarks.figures.results import save_report
from benchmarks.figures.tables import Table
from redraft.console.progress import tracked
from redraft.decoding.construction import beams_of
from redraft.decoding.packing import pack_beams
from redraft.model_defs.target.model import Target
from studies.replay.answers import Answer, read
from studies.replay.replay import Outcome, Replayer, cut, interval, roots_of
from studies.training.learning_curve import labels_of

console = Console()


def shapes(replayer: Replayer, answers: Sequence[Answer], width: int, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Acceptance and rows of beams of one width and each of several lengths."""
    outcomes = {length: Outcome() for length in lengths}
    for answer in answers:
        drafts = replayer.draft(answer, width, max(lengths))
        for length, outcome in outcomes.items():
            tree = pack_beams(roots_of(answer), *beams_of(cut(drafts, length), width))
            outcome.follow(tree, answer.text, length)
    return [
        {
            "width": width,
            "length": length,
            "acceptance_length": outcome.acceptance_length,
            "interval": interval(outcome.accepted),
            "rows_per_step": sum(outcome.rows) / len(outcome.rows),
            "steps": len(outcome.rows),
        }
        for length, outcome in outcomes.items()
    ]


def table(label: str, results: Sequence[dict[str, Any]]) -> Table:
    """Beam widths down, lengths across; in each cell the acceptance length and the rows of a step, root included."""
    lengths = sorted({row["length"] for row in results})
    shown = Table(f"{label}: tokens per step (rows per step)", ["beam width", *(f"length {n}" for n in lengths)])
    cells = {(row["width"], row["length"]): row for row in results}
    for width in sorted({row["width"] for row in results}):
        row = [cells[width, length] for length in lengths]
        figures = [f"{cell['acceptance_length']:.2f} ({cell['rows_per_step']:.0f})" for cell in row]
        shown.rows.append([str(width), *figures])
    return shown


def comparison(drafters: dict[str, list[dict[str, Any]]]) -> Table:
    """ReDrafter's table 6: the longest beams of each drafter by width, and what the first gains over the others."""
    length = max(row["length"] for results in drafters.values() for row in results)
    longest = {
        label: {row["width"]: row for row in results if row["length"] == length} for label, results in drafters.items()
    }
    widths = sorted(next(iter(longest.values())))
    shown = Table(f"Tokens per step, beams of length {length}", ["drafter", *(f"width {width}" for width in widths)])
    for label, rows in longest.items():
        figures = [f"{rows[width]['acceptance_length']:.2f} ±{rows[width]['interval']:.2f}" for width in widths]
        shown.rows.append([label, *figures])
    (first, best), *others = longest.items()
    for label, rows in others:
        gains = [best[width]["acceptance_length"] / rows[width]["acceptance_length"] - 1 for width in widths]
        shown.rows.append([f"{first} over {label}", *(f"{gain:+.1%}" for gain in gains)])
    return shown


def plot(drafters: dict[str, list[dict[str, Any]]], path: Path) -> Path:
    """A panel per drafter: acceptance over width, a line per length."""
    figure, axes = new_figure(len(drafters))
    most = max(row["acceptance_length"] for results in drafters.values() for row in results)
    for axis, (label, results) in zip(axes, drafters.items(), strict=True):
        series = {
            f"length {length}": {
                str(row["width"]): row["acceptance_length"] for row in results if row["length"] == length
            }
            for length in sorted({row["length"] for row in results})
        }
        lines(axis, series, (label, "beam width", "tokens per step"))
        axis.set_ylim(1, 1.05 * most)
        axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower right")
    return save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Replay every shape, print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the target, written by redraft fetch")
    add("--drafters", type=Path, nargs="+", required=True, help="folders of drafters")
    add("--answers", type=Path, default=Path("artifacts/answers"), help="folder written by studies.replay.answers")
    add("--num-prompts", type=int, default=20, help="answers, spread evenly over the folder")
    add("--max-tokens", type=int, default=64, help="of each answer")
    add("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    add("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    add("--output", type=Path, default=Path("docs/results/beam_shapes.json"))
    args = parser.parse_args(argv)
    target = Target.from_folder(args.model)
    results: dict[str, list[dict[str, Any]]] = {}
    try:
        answers = read(args.answers, args.num_prompts, args.max_tokens)
        for label, folder in zip(labels_of(args.drafters), args.drafters, strict=True):
            replayer = Replayer.load(folder, target, max(args.lengths))
            widths = tracked(args.widths, f"replaying {label}", "widths", console)
            results[label] = [row for width in widths for row in shapes(replayer, answers, width, args.lengths)]
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        parser.error(str(error))
    for label, rows in results.items():
        table(label, rows).show(console)
    if len(results) > 1:
        comparison(results).show(console)
    save_report(args.output, {"answers": len(answers), "max_tokens": args.max_tokens, "drafters": results})
    console.print(f"written to {args.output}")


if __name__ == "__main__":
    main()
