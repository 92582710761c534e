"""Acceptance of drafters along the target's own greedy answers (`studies.replay.answers`).

    python -m studies.replay.acceptance packing --model MODEL --drafter DRAFTER
    python -m studies.replay.acceptance shapes --model MODEL --drafter DRAFTER

`packing` is ReDrafter's figure 6, left: rows that the target executes where beams share their prefixes. `shapes` is its
figure 7: tokens per step by beam width and length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import ModelFolder, NumPrompts, Report, console, run
from redraft.console.program import Rows
from redraft.console.progress import tracked
from redraft.decoding.construction import beams_of
from redraft.decoding.packing import pack_beams
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.model_defs.target.model import Target
from studies.replay.answers import Answer, read
from studies.replay.replay import Outcome, Replayer, cut, roots_of
from studies.training import labels_of

Drafters = Annotated[list[Path], typer.Option("--drafter", metavar="FOLDER", help="Drafters to compare.")]
Answers = Annotated[Path, typer.Option(help="Folder written by studies.replay.answers.")]
Tokens = Annotated[int | None, typer.Option(help="Tokens of each answer; default: all.")]
app = typer.Typer(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), no_args_is_help=True, rich_markup_mode=None)


def load(
    model: Path, drafters: list[Path], answers: Path, num_prompts: int | None, max_tokens: int | None, levels: int
) -> tuple[dict[str, Replayer], list[Answer]]:
    """Load the drafters by their labels, and the answers. Raises typer.BadParameter where one cannot be read."""
    try:
        target = Target.from_folder(model)
        labels = zip(labels_of(drafters), drafters, strict=True)
        replayers = {label: Replayer.load(folder, target, levels) for label, folder in labels}
        return replayers, read(answers, num_prompts, max_tokens)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from None


def beams(replayer: Replayer, answers: Sequence[Answer], width: int, lengths: Sequence[int]) -> dict[int, Outcome]:
    """Packed beams of one width along the answers, by length: shorter beams are the first levels of one search."""
    outcomes = {length: Outcome() for length in lengths}
    for answer in answers:
        drafts = replayer.draft(answer, width, max(lengths))
        for length, outcome in outcomes.items():
            outcome.follow(pack_beams(roots_of(answer), *beams_of(cut(drafts, length), width)), answer)
    return outcomes


@app.command(cls=Rows)
def packing(
    model: ModelFolder,
    drafters: Drafters,
    answers: Answers = Path("artifacts/answers"),
    num_prompts: NumPrompts = 8,
    max_tokens: Tokens = 64,
    widths: Annotated[list[int], typer.Option("--beam-widths", help="Beams, one run for each.")] = list(
        range(5, 75, 5)
    ),
    length: Annotated[int, typer.Option("--beam-length", help="Levels of the beams.")] = 5,
    output: Report = Path("artifacts/reports/beam_packing.json"),
) -> None:
    """Rows that the target executes with and without packing, by beam width; the root is not counted."""
    replayers, texts = load(model, drafters, answers, num_prompts, max_tokens, length)
    (label, replayer), *_ = replayers.items()
    results = []
    for width in tracked(widths, "searching beams", "widths", console):
        outcome, unpacked = beams(replayer, texts, width, [length])[length], width * length
        rows = np.array(outcome.rows) - 1
        packed, (low, high) = float(rows.mean()), np.percentile(rows, [1, 99])
        saved = {"fewer": 1 - packed / unpacked, "compression": unpacked / packed}
        counts = {"width": width, "unpacked": unpacked, "packed": packed, "p1": float(low), "p99": float(high)}
        results.append({**counts, **saved, "acceptance_length": outcome.acceptance_length, "steps": len(rows)})
    columns = ["beam width", "rows without", "rows with packing", "1st-99th percentile", "fewer", "accepted"]
    table = Table("Draft rows that the target executes per step (ReDrafter, figure 6)", columns)
    for row in results:
        cells = [f"{row['packed']:.1f}", f"{row['p1']:.0f}-{row['p99']:.0f}", f"{row['fewer']:.0%}"]
        table.rows.append([str(row["width"]), str(row["unpacked"]), *cells, f"{row['acceptance_length']:.2f}"])
    setting = {"drafter": label, "answers": len(texts), "max_tokens": max_tokens, "beam_length": length}
    finish(output, {**setting, "widths": results}, table)


@app.command(cls=Rows)
def shapes(
    model: ModelFolder,
    drafters: Drafters,
    answers: Answers = Path("artifacts/answers"),
    num_prompts: NumPrompts = 20,
    max_tokens: Tokens = 64,
    widths: Annotated[list[int], typer.Option("--beam-widths", help="Beams, one run for each.")] = [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
    ],
    lengths: Annotated[list[int], typer.Option("--beam-lengths", help="Levels, one run for each.")] = [1, 2, 3, 4, 5],
    output: Report = Path("artifacts/reports/beam_shapes.json"),
) -> None:
    """Tokens per step by beam width and length, the bonus token included."""
    replayers, texts = load(model, drafters, answers, num_prompts, max_tokens, max(lengths))
    results: dict[str, list[dict[str, Any]]] = {}
    tables = []
    for label, replayer in replayers.items():
        title = f"{label}: tokens per step (rows per step)"
        tables.append(Table(title, ["beam width", *(f"length {length}" for length in lengths)]))
        for width in tracked(widths, f"replaying {label}", "widths", console):
            outcomes = beams(replayer, texts, width, lengths)
            rows = [
                {"width": width, "length": length, **outcome.figures, "rows_per_step": float(np.mean(outcome.rows))}
                for length, outcome in outcomes.items()
            ]
            results.setdefault(label, []).extend(rows)
            cells = (f"{row['acceptance_length']:.2f} ({row['rows_per_step']:.0f})" for row in rows)
            tables[-1].rows.append([str(width), *cells])
    finish(output, {"answers": len(texts), "max_tokens": max_tokens, "drafters": results}, *tables)


if __name__ == "__main__":
    run(app)
