"""Rows that the target executes where beams share their prefixes (ReDrafter, figure 6, left), by beam width.

    python -m studies.replay.packing --model MODEL --drafter DRAFTER

The drafter is a torch module in float32, replayed over the target's own greedy answers (`studies.replay.answers`).
Speculation does not change the output, so following an answer through the beams that are drafted at its places gives
the steps of live greedy decoding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.command import ModelFolder, NumPrompts, Report, console, run
from redraft.batch import DraftCandidates
from redraft.console.progress import tracked
from redraft.decoding.construction import beams_of
from redraft.decoding.packing import pack_beams
from redraft.decoding.token_tree import TokenTree, follow
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.model_defs.drafters.base import Drafter
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.model_defs.target.model import Target
from studies.replay.answers import Answer, read

ROWS_AT_ONCE = 512
"""Nodes that are expanded at a time."""


def load(folder: Path, target: Target, levels: int) -> Drafter:
    """The drafter of a folder, for drafts of at most `levels`. Raises as `load_drafter`, and ValueError for one that
    reads a context or cannot draft so deep."""
    drafter = load_drafter(folder, target).float()
    if drafter.reads_context:
        raise ValueError(f"a drafter {drafter.name!r} reads a context: it cannot be replayed")
    drafter.prepare(0, levels)
    return drafter


@torch.no_grad()
def draft(drafter: Drafter, answer: Answer, width: int, length: int) -> DraftCandidates:
    """A beam search with every token of the answer but the last as its root."""
    roots = answer.tokens[answer.start : -1].to(torch.int32)
    states = answer.hidden[answer.start - 1 : answer.start - 1 + len(roots)]
    search = BeamSearch(drafter, width, length, width)
    size = max(1, ROWS_AT_ONCE // width)
    parts = [
        [part.numpy() for part in search((states[first : first + size], roots[first : first + size]))[:3]]
        for first in range(0, len(roots), size)
    ]
    return DraftCandidates(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def steps(tree: TokenTree, text: list[int]) -> list[tuple[int, int]]:
    """Decode a known text with the trees at its tokens but the last. Returns the accepted tokens and the drafted rows
    of each step."""
    result, index = [], 0
    while index < len(text) - 1:
        accepted = len(follow(tree.nodes[index], text[index + 1 :]))
        result.append((accepted, len(tree.nodes[index]) - 1))
        index += accepted + 1
    return result


def packed(drafter: Drafter, answer: Answer, width: int, length: int) -> list[tuple[int, int]]:
    """The steps of an answer by packed beams."""
    roots = np.array(answer.text[:-1], np.int32)
    return steps(pack_beams(roots, *beams_of(draft(drafter, answer, width, length), width)), answer.text)


def main(
    model: ModelFolder,
    drafter: Annotated[Path, typer.Option(metavar="FOLDER", help="Drafter to replay.")],
    answers: Annotated[Path, typer.Option(help="Folder written by studies.replay.answers.")] = Path(
        "artifacts/answers"
    ),
    num_prompts: NumPrompts = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    widths: Annotated[list[int], typer.Option("--beam-widths", help="Beams, one run for each.")] = [5, 10, 20, 40],
    length: Annotated[int, typer.Option("--beam-length", help="Levels of the beams.")] = 5,
    output: Report = Path("artifacts/reports/beam_packing.json"),
) -> None:
    try:
        loaded, texts = load(drafter, Target.from_folder(model), length), read(answers, num_prompts, max_tokens)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from None
    results = []
    for width in tracked(widths, "searching beams", "widths", console):
        accepted, rows = np.array([step for answer in texts for step in packed(loaded, answer, width, length)]).T
        mean, unpacked, (low, high) = float(rows.mean()), width * length, np.percentile(rows, [1, 99])
        counts = {"width": width, "unpacked": unpacked, "packed": mean, "p1": float(low), "p99": float(high)}
        saved = {"fewer": 1 - mean / unpacked, "compression": unpacked / mean}
        results.append({**counts, **saved, "acceptance_length": 1 + float(accepted.mean()), "steps": len(rows)})
    columns = ["beam width", "rows without", "rows with packing", "1st-99th percentile", "fewer", "accepted"]
    table = Table("Draft rows that the target executes per step (ReDrafter, figure 6)", columns)
    for row in results:
        cells = [f"{row['packed']:.1f}", f"{row['p1']:.0f}-{row['p99']:.0f}", f"{row['fewer']:.0%}"]
        table.rows.append([str(row["width"]), str(row["unpacked"]), *cells, f"{row['acceptance_length']:.2f}"])
    setting = {"drafter": drafter.name, "answers": len(texts), "max_tokens": max_tokens, "beam_length": length}
    finish(output, {**setting, "widths": results}, table)


if __name__ == "__main__":
    run(main)
