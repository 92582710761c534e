"""Replayed acceptance against live decoding: whether following known answers gives what a bundle's engine accepts.

    build/build_engines.py --model MODEL --methods benchmarks/methods/cross_check.toml --output BUNDLE
    python -m benchmarks.replay.cross_check --model MODEL --bundle BUNDLE --answers artifacts/answers

Tables of acceptance are replays of float32 drafters over the target's greedy answers (python -m
benchmarks.replay.answers). Each method of the file is such a table's cell: here it is replayed, and the bundle decodes
the same prompts with it. The engine holds weights in fewer bits, so the two agree up to what that changes.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.figures.intervals import interval, ratio
from benchmarks.figures.results import write_json
from benchmarks.figures.tables import Table
from benchmarks.replay.answers import Answer, read
from benchmarks.replay.replay import Outcome, Replayer, roots_of
from benchmarks.speed.inprocess import load_llm
from model_defs.target.model import Target
from redraft.bundle.config import MethodConfig
from redraft.bundle.manifest import Bundle
from redraft.decoding.construction import CONSTRUCTIONS
from redraft.decoding.token_tree import prune_tree
from redraft.llm import LLM
from redraft.request import GenerateRequest

console = Console()


def replayed(replayer: Replayer, answers: Sequence[Answer], method: MethodConfig) -> dict[str, Any]:
    """Acceptance and rows of a method's trees along the answers."""
    outcomes, budget = [Outcome() for _ in answers], method.tree_budget
    for answer, outcome in zip(answers, outcomes, strict=True):
        drafts = replayer.draft(answer, method.beam_width, method.beam_length, method.candidates)
        tree = CONSTRUCTIONS[method.construction or ""].build(drafts, roots_of(answer), budget)
        deepest = [remaining - 1 for remaining in range(len(tree.nodes), 0, -1)]
        outcome.follow(prune_tree(tree, [budget] * len(deepest), deepest), answer.text, 0)
    accepted, steps, rows = (
        np.array([count(outcome) for outcome in outcomes])
        for count in (lambda o: sum(o.accepted), lambda o: len(o.accepted), lambda o: sum(o.rows))
    )
    return figures(accepted, steps, rows)


def decoded(llm: LLM, name: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """The same of live decoding, one request at a time."""
    requests = [
        GenerateRequest(
            id=f"{place}",
            input_ids=answer.tokens[: answer.start].tolist(),
            max_tokens=len(answer.text),
            end_id=-1,
            method=name,
        )
        for place, answer in enumerate(answers)
    ]
    stats = [answer.stats for answer in llm.run(requests)]
    accepted, steps, rows = (
        np.array([count(item) for item in stats])
        for count in (lambda s: s.accepted, lambda s: s.steps, lambda s: s.rows_executed - s.prompt_tokens)
    )
    return figures(accepted, steps, rows)


def figures(accepted: np.ndarray, steps: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    """From the counts of each prompt, int [prompts]."""
    return {
        "acceptance_length": 1 + float(accepted.sum() / steps.sum()),
        "interval": interval(1 + ratio(accepted, steps)),
        "rows_per_step": float(rows.sum() / steps.sum()),
        "steps": int(steps.sum()),
    }


def table(report: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """A row per method."""
    shown = Table("Tokens and rows per step", ["method", "tokens, replayed", "decoded", "rows, replayed", "decoded"])
    for name, ways in report.items():
        shown.rows.append([name])
        for way in ways.values():
            low, high = way["interval"]
            shown.rows[-1].append(f"{way['acceptance_length']:.2f} ({low:.2f} to {high:.2f})")
        shown.rows[-1] += [f"{way['rows_per_step']:.1f}" for way in ways.values()]
    return shown


def main(argv: list[str] | None = None) -> None:
    """Replay and decode every method, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the target, written by build/fetch_model.py")
    add("--bundle", type=Path, required=True, help="bundle of the methods")
    add(
        "--methods",
        type=Path,
        default=Path(__file__).parents[1] / "methods" / "cross_check.toml",
        help="the file that it was built with",
    )
    add("--answers", type=Path, default=Path("artifacts/answers"), help="folder written by benchmarks.replay.answers")
    add("--num-prompts", type=int, help="answers, spread evenly over the folder; default: all")
    add("--max-tokens", type=int, default=64, help="of each answer")
    add("--output", type=Path, default=Path("artifacts/reports/cross_check.json"))
    args = parser.parse_args(argv)
    try:
        answers = read(args.answers, args.num_prompts, args.max_tokens)
        folders = {name: Path(one["drafter"]) for name, one in tomllib.loads(args.methods.read_text()).items()}
        target, known = Target.from_folder(args.model), Bundle.load(args.bundle).config.methods
        llm = load_llm(parser, args.bundle)
        report = {}
        for name, folder in folders.items():
            replayer = Replayer.load(folder, target, known[name].beam_length)
            report[name] = {
                "replayed": replayed(replayer, answers, known[name]),
                "decoded": decoded(llm, name, answers),
            }
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        parser.error(str(error))
    table(report).show(console)
    write_json(args.output, {"answers": len(answers), "max_tokens": args.max_tokens, "methods": report})
    console.print(f"written to {args.output}")


if __name__ == "__main__":
    main()
