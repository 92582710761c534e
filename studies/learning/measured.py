"""Tokens per step of two bundles, before and after learning, on held-out prompts of the domains and on other prompts.

    python -m studies.learning.measured --bundle BEFORE --bundle AFTER --prompts mt_bench.jsonl --output learning.json

Answers are greedy. Each step drafts a tree of as many nodes as the method may, whatever pays, and nothing is drafted
from what was served to others. Intervals are 95%, over prompts. `same_answers` counts those with the same tokens from
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import PROMPTS_FILE, BundleFolders, MaxTokens, NumPrompts, PromptsFile, Report, Threads, run
from redraft.chat import encode_user_turn
from redraft.loadtest.intervals import interval, ratio
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.prompts import load_prompts
from redraft.request import SequenceStats
from redraft.runtime import Runtime
from studies.learning.domains import DOMAINS
from studies.learning.served import HELD_OUT, answer, prompts_of


def lengths(stats: Sequence[SequenceStats]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that each answer gained in steps, and its steps, float64 [prompts] each."""
    steps = np.array([each.steps for each in stats], np.float64)
    return steps + np.array([each.accepted for each in stats], np.float64), steps


def compared(before: Sequence[SequenceStats], after: Sequence[SequenceStats]) -> dict[str, Any]:
    """Tokens per step of both, and their ratio with its interval."""
    both = [lengths(stats) for stats in (before, after)]
    drawn = [ratio(*each) for each in both]
    was, now = (float(tokens.sum() / steps.sum()) for tokens, steps in both)
    low, high = interval(drawn[1] / drawn[0])
    return {
        "prompts": len(before),
        "tokens_per_step_before": round(was, 3),
        "tokens_per_step_after": round(now, 3),
        "ratio": round(now / was, 3),
        "ratio_low": round(low, 3),
        "ratio_high": round(high, 3),
    }


def measure(bundle: Path, count: int, turns: Sequence[str], max_tokens: int, threads: int | None) -> dict[str, Any]:
    """The answers of a bundle to each set of prompts."""
    runtime = Runtime.load(bundle, threads, prefix_reuse=False)
    runtime.fix_budget()
    sets = {name: prompts_of(runtime, name, count, HELD_OUT) for name in DOMAINS}
    sets["other prompts"] = [encode_user_turn(bundle, runtime.codec, turn) for turn in turns]
    answers = {name: answer(runtime, prompts, max_tokens) for name, prompts in sets.items() if prompts}
    runtime.engine.close()
    return answers


def main(
    bundle: BundleFolders,
    prompts: PromptsFile = PROMPTS_FILE,
    num_prompts: NumPrompts = None,
    count: Annotated[int, typer.Option(min=1, help="Held-out prompts of each domain.")] = 48,
    max_tokens: MaxTokens = 80,
    threads: Threads = None,
    output: Report = Path("artifacts/reports/learning.json"),
) -> None:
    """Compare two bundles."""
    if len(bundle) != 2:
        raise typer.BadParameter("--bundle: expected two, before and after learning")
    turns = [prompt.turns[0] for prompt in load_prompts(prompts)]
    turns = turns[:: max(len(turns) // (num_prompts or len(turns)), 1)][:num_prompts]
    before, after = (measure(each, count, turns, max_tokens, threads) for each in bundle)
    report: dict[str, Any] = {"max_tokens": max_tokens, "sets": {}}
    for name, answers in before.items():
        pairs = list(zip(answers, after[name], strict=True))
        figures = compared([was[1] for was, _ in pairs], [now[1] for _, now in pairs])
        report["sets"][name] = figures | {"same_answers": sum(was[0] == now[0] for was, now in pairs)}
    finish(output, report, table(report))


def table(report: dict[str, Any]) -> Table:
    """Tokens per step before and after, by what is asked."""
    rows = []
    for name, row in report["sets"].items():
        cells = (f"{row[key]:.2f}" for key in ("tokens_per_step_before", "tokens_per_step_after", "ratio"))
        rows.append([name, str(row["prompts"]), *cells, f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"])
    return Table("tokens per step", ["prompts of", "prompts", "before", "after", "ratio", "95%"], rows)


if __name__ == "__main__":
    run(main)
