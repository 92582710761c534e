"""Acceptance and cost of n-gram retrieval, by what it has served before (the n-gram baseline of Lyanna, section 7.1).

    python -m benchmarks.replay.retrieval --answers artifacts/answers --warm-up TEACHER_DATA

The target's greedy answers (python -m benchmarks.replay.answers) are decoded one after the other with trees from
memory: of only the request's own text, of all requests before it too, and with answers to other prompts served before
them all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.figures.results import write_json
from benchmarks.figures.tables import Table
from benchmarks.replay.answers import Answer, read
from benchmarks.replay.replay import interval
from redraft.console.progress import tracked
from redraft.decoding.retrieval import Retrieval, RetrievalText
from redraft.decoding.token_tree import follow

DEPTH = 8
console = Console()


@dataclass
class Served:
    """What serving answers cost and gained."""

    accepted: list[int] = field(default_factory=list)
    read_tokens: int = 0
    read_s: float = 0.0
    draft_s: float = 0.0

    def serve(self, answer: Answer, memory: Retrieval, budget: int) -> None:
        """Decode one answer with trees of so many nodes; the memory keeps it and its prompt."""
        text = RetrievalText(memory)
        self._read(text, answer.tokens[: answer.start + 1].tolist())
        left = answer.text[1:]
        while left:
            started = time.perf_counter()
            nodes = text.draft(budget, DEPTH)
            self.draft_s += time.perf_counter() - started
            self.accepted.append(len(follow(nodes, left)))
            gained = self.accepted[-1] + 1
            self._read(text, left[:gained])
            left = left[gained:]

    def _read(self, text: RetrievalText, tokens: list[int]) -> None:
        started = time.perf_counter()
        text.extend(tokens)
        text.read()
        self.read_s += time.perf_counter() - started
        self.read_tokens += len(tokens)

    def summary(self) -> dict[str, float]:
        """Tokens per step with its 95% interval, microseconds per draft and per token read."""
        steps = len(self.accepted)
        return {
            "acceptance_length": 1 + sum(self.accepted) / steps,
            "interval": interval(self.accepted),
            "draft_us": 1e6 * self.draft_s / steps,
            "read_us": 1e6 * self.read_s / self.read_tokens,
        }


def serve(answers: Sequence[Answer], budget: int, warm_up: Sequence[Answer], shared: bool) -> dict[str, float]:
    """Serve answers in turn, after those to warm up with; with `shared` off, each from a memory of its own."""
    memory, served = Retrieval.of(answer.tokens.tolist() for answer in warm_up), Served()
    for answer in answers:
        served.serve(answer, memory if shared else Retrieval(len(answer.tokens)), budget)
    return served.summary()


def main(argv: list[str] | None = None) -> None:
    """Print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--answers", type=Path, default=Path("artifacts/answers"), help="folder written by benchmarks.replay.answers")
    add("--num-prompts", type=int, help="answers, spread evenly over the folder; default: all")
    add("--warm-up", type=Path, nargs="*", default=[], help="folders of answers to other prompts, or of teacher data")
    add("--budgets", type=int, nargs="+", default=[4, 8, 16, 32], help="nodes of a tree")
    add("--output", type=Path, default=Path("docs/results/retrieval.json"))
    args = parser.parse_args(argv)
    try:
        answers = read(args.answers, args.num_prompts)
        warm_up = [answer for folder in args.warm_up for answer in read(folder)]
    except ValueError as error:
        parser.error(str(error))
    tokens = sum(len(answer.tokens) for answer in warm_up)
    memories: dict[str, tuple[list[Answer], bool]] = {
        "the request alone": ([], False),
        "all requests before": ([], True),
    }
    if warm_up:
        memories[f"and {tokens:,} tokens of others"] = (warm_up, True)
    cells = [(name, budget) for name in memories for budget in args.budgets]
    results = [
        {"memory": name, "budget": budget, **serve(answers, budget, *memories[name])}
        for name, budget in tracked(cells, "serving", "settings", console)
    ]
    shown = Table("N-gram retrieval", ["memory", "nodes", "tokens per step", "us per draft", "us per token read"])
    for row in results:
        accepted = f"{row['acceptance_length']:.2f} ±{row['interval']:.2f}"
        costs = (f"{row[key]:.0f}" for key in ("draft_us", "read_us"))
        shown.rows.append([str(row["memory"]), str(row["budget"]), accepted, *costs])
    shown.show(console)
    write_json(args.output, {"answers": len(answers), "warm_up_tokens": tokens, "cells": results})
    console.print(f"written to {args.output}")


if __name__ == "__main__":
    main()
