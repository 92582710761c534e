"""Throughput of a bundle's methods by batch size (ReDrafter, table 5; Lyanna, figures 8 to 11).

    python -m benchmarks.speed.method_batches --bundle BUNDLE --batches 1 2 4 8 16
    python -m benchmarks.speed.method_batches --bundle BUNDLE --methods width_1 width_4 tuned --best-of tuned

Each method answers the same prompts, so many at a time, beside auto-regressive decoding in the same engine or, with
--auto-regressive, in that of a bundle of its own, which has no features to output. Methods take turns, and each
cell is its best round. Before every round the method answers as many other prompts of the file (--warm-up at most), so
that engines warm up, and one that drafts from what was served all of them: it has served only those. A bundle with one
method per beam width gives table 5; with --best-of, the table ends with how far that method falls short of the best of
each batch size.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.figures.results import save_report
from benchmarks.figures.tables import Table
from benchmarks.load.workload import ChatTokenizer
from benchmarks.speed.inprocess import Clock, load_llm, require_fit, timed
from redraft.console.progress import tracked
from redraft.llm import LLM, Answer
from redraft.prompts import load_prompts, spread
from redraft.request import AUTO_REGRESSIVE, InvalidRequest, request

console = Console()


def answer_all(
    llm: LLM, method: str, prompts: Sequence[str], warm_up: Sequence[str], batch: int, options: dict[str, Any]
) -> tuple[list[Answer], Clock]:
    """One round: all prompts answered, `batch` at a time, after those to warm up with, and the time that it took. What
    was served before is forgotten."""
    llm.runtime.with_plans(llm.runtime.plans)
    plan = llm.runtime.plans.get(method)
    served = warm_up if plan and plan.retrieves else warm_up[:batch]
    llm.run([request(text, method=method, **options) for text in served], batch)
    return timed(llm, [request(text, method=method, seed=i, **options) for i, text in enumerate(prompts)], batch)


def throughput(answers: Sequence[Answer], spent: Clock) -> dict[str, float]:
    """The figures of a round."""
    steps = max(sum(answer.stats.steps for answer in answers), 1)
    return {
        "tokens_per_s": sum(answer.stats.output_tokens for answer in answers) / spent.wall_s,
        "acceptance_length": 1 + sum(answer.stats.accepted for answer in answers) / steps,
        "drafted_per_step": sum(answer.stats.drafted for answer in answers) / steps,
        "drafting_share": spent.drafting_share,
    }


def table(results: Sequence[Mapping[str, Any]], best_of: str | None) -> Table:
    """Methods down, batch sizes across: tokens/s of all requests, those of each, speed-up, and tokens per step."""
    batches = list(dict.fromkeys(row["batch"] for row in results))
    cells = {(row["method"], row["batch"]): row for row in results}
    shown = Table(
        "Tokens/s of all requests (of each; over auto-regressive; tokens per step)",
        ["method", *(f"batch {batch}" for batch in batches)],
    )
    for method in dict.fromkeys(row["method"] for row in results):
        texts = []
        for batch in batches:
            row, reference = cells[method, batch], cells[AUTO_REGRESSIVE, batch]["tokens_per_s"]
            total, length = row["tokens_per_s"], row["acceptance_length"]
            texts.append(f"{total:.0f} ({total / batch:.0f}; {total / reference:.2f}x; {length:.2f})")
        shown.rows.append([method, *texts])
    if best_of:
        behind = []
        for batch in batches:
            best = max(row["tokens_per_s"] for row in results if row["batch"] == batch)
            behind.append(f"{cells[best_of, batch]['tokens_per_s'] / best - 1:+.1%}")
        shown.rows.append([f"{best_of} against the best", *behind])
    return shown


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The flags that say what is answered, and how often."""
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="requests at a time")
    add("--dataset", type=Path, default=Path(__file__).parents[1] / "prompts.jsonl")
    add("--num-prompts", type=int, default=48, help="so many, spread evenly over the file")
    add("--max-tokens", type=int, default=64)
    add("--warm-up", type=int, default=32, help="other prompts that a method has served which drafts from those")
    add("--rounds", type=int, default=2)


def load_workload(
    parser: argparse.ArgumentParser, args: argparse.Namespace, llms: Sequence[LLM]
) -> tuple[list[str], list[str]]:
    """The prompts, and those to warm up with, as chats that every LLM can answer; else the command ends with the
    reason."""
    if max(args.batches) > (slots := min(llm.runtime.limits.slots for llm in llms)):
        parser.error(f"--batches {max(args.batches)}: the bundle has {slots} slots")
    tokenizer = ChatTokenizer(args.bundle)
    chats = [tokenizer.chat(prompt.turns[0]) for prompt in load_prompts(args.dataset)]
    prompts = spread(chats, args.num_prompts)
    warm_up = spread([chat for chat in chats if chat not in prompts], args.warm_up)
    if not warm_up:
        parser.error(f"--num-prompts {len(prompts)}: expected fewer than the file's, some are to warm up with")
    try:
        for llm in llms:
            require_fit(llm, [*prompts, *warm_up], args.max_tokens)
    except InvalidRequest as error:
        parser.error(f"{args.dataset}: {error}")
    return prompts, warm_up


def main(argv: list[str] | None = None) -> None:
    """Run every method at every batch size, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--bundle", type=Path, required=True, help="bundle with the methods")
    add("--methods", nargs="+", help="some of them; default: all")
    add("--auto-regressive", type=Path, help="bundle without drafter, of the same precision (default: the same engine)")
    add("--best-of", metavar="METHOD", help="compare this method with the best at each batch size")
    add("--temperature", type=float, default=0.0)
    add_workload(parser)
    add("--output", type=Path, default=Path("docs/results/method_batches.json"))
    args = parser.parse_args(argv)
    llm = load_llm(parser, args.bundle)
    plain = load_llm(parser, args.auto_regressive) if args.auto_regressive else llm
    known = [AUTO_REGRESSIVE, *llm.runtime.plans]
    methods = list(dict.fromkeys([AUTO_REGRESSIVE, *(args.methods or known)]))
    if unknown := {*methods, args.best_of or AUTO_REGRESSIVE} - set(known):
        parser.error(f"the bundle has no method {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    prompts, warm_up = load_workload(parser, args, [llm, plain])
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    best: dict[tuple[str, int], dict[str, Any]] = {}
    turns = [(batch, method) for _ in range(args.rounds) for batch in args.batches for method in methods]
    for batch, method in tracked(turns, "answering", "turns", console):
        engine = plain if method == AUTO_REGRESSIVE else llm
        answers, spent = answer_all(engine, method, prompts, warm_up, batch, options)
        row = {"method": method, "batch": batch, **throughput(answers, spent)}
        known_best = best.setdefault((method, batch), row)
        if row["tokens_per_s"] > known_best["tokens_per_s"]:
            best[method, batch] = row
    for one in {llm, plain}:
        one.close()
    results = list(best.values())
    table(results, args.best_of).show(console)
    save_report(
        args.output,
        {
            "prompts": len(prompts),
            "auto_regressive": (args.auto_regressive or args.bundle).name,
            "warm_up": len(warm_up),
            **options,
            "rounds": args.rounds,
            "cells": results,
        },
    )
    console.print(f"written to {args.output}")


if __name__ == "__main__":
    main()
