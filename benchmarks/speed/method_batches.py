"""Throughput of a bundle's methods by batch size (ReDrafter, table 5; Lyanna, figures 8 to 11).

    python -m benchmarks.speed.method_batches --bundle BUNDLE --concurrency 1 2 4 8 16
    python -m benchmarks.speed.method_batches --bundle BUNDLE --method width_1 width_4 tuned --best-of tuned

Each method answers the same prompts, --concurrency at a time, beside auto-regressive decoding in the same engine or,
with --auto-regressive, in that of a bundle of its own, which has no features to output. Methods take turns, and each
cell is its best round, after as many prompts to warm up. Nothing is drafted from what was served to others. A bundle
with one method per beam width gives table 5; with --best-of, the table ends with how far that method falls short of
the best of each batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import (
    PROMPTS_FILE,
    BundleFolder,
    Concurrency,
    FixedBudget,
    MaxTokens,
    Methods,
    PlainBundle,
    PromptsFile,
    Report,
    console,
    run,
)
from benchmarks.speed.inprocess import Clock, load_llm, methods_of, require_fit, timed, write_caches
from redraft.console.progress import tracked
from redraft.llm import LLM, Answer
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.loadtest.workload import ChatTokenizer
from redraft.prompts import load_prompts, spread
from redraft.request import AUTO_REGRESSIVE, GenerateRequest

FewPrompts = Annotated[int, typer.Option("--num-prompts", min=1, help="Prompts, spread evenly over the file.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each method, of which the best counts.")]


@dataclass(frozen=True)
class Workload:
    """Requests of no method yet."""

    requests: list[GenerateRequest]

    @classmethod
    def load(
        cls, bundle: Path, llms: Sequence[LLM], prompts: Path, count: int, batches: Sequence[int], max_tokens: int,
        temperature: float,
    ) -> Workload:  # fmt: skip
        """Read chats that every LLM can answer. Raises typer.BadParameter."""
        if max(batches) > (slots := min(llm.runtime.limits.slots for llm in llms)):
            raise typer.BadParameter(f"--concurrency {max(batches)}: the bundle has {slots} slots")
        tokenizer, chosen = ChatTokenizer(bundle), spread(load_prompts(prompts), count)
        options = {"temperature": temperature}
        loaded = cls([tokenizer.request(p.turns[0], max_tokens, seed=i, **options) for i, p in enumerate(chosen)])
        for llm in llms:
            require_fit(llm, loaded.requests, prompts)
        return loaded

    def answer(self, llm: LLM, method: str, batch: int) -> tuple[list[Answer], Clock]:
        """One round: all requests, `batch` at a time, after the first `batch` of them to warm up."""
        requests = [request.model_copy(update={"method": method}) for request in self.requests]
        llm.run(requests[:batch], batch)
        return timed(llm, requests, batch)


def best_rounds(
    rounds: int, batches: Sequence[int], methods: Sequence[str],
    answer: Callable[[str, int], tuple[list[Answer], Clock]],
) -> dict[tuple[str, int], dict[str, Any]]:  # fmt: skip
    """Let the methods take turns at every batch size. Returns each one's best round."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    turns = [(batch, method) for _ in range(rounds) for batch in batches for method in methods]
    for batch, method in tracked(turns, "answering", "turns", console):
        row = {"method": method, "batch": batch, **throughput(*answer(method, batch))}
        if row["tokens_per_s"] >= best.setdefault((method, batch), row)["tokens_per_s"]:
            best[method, batch] = row
    return best


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
    result = Table(
        "Tokens/s of all requests (of each; over auto-regressive; tokens per step)",
        ["method", *(f"batch {batch}" for batch in batches)],
    )
    for method in dict.fromkeys(row["method"] for row in results):
        texts = []
        for batch in batches:
            row, reference = cells[method, batch], cells[AUTO_REGRESSIVE, batch]["tokens_per_s"]
            total, length = row["tokens_per_s"], row["acceptance_length"]
            texts.append(f"{total:.0f} ({total / batch:.0f}; {total / reference:.2f}x; {length:.2f})")
        result.rows.append([method, *texts])
    if best_of:
        behind = []
        for batch in batches:
            best = max(row["tokens_per_s"] for row in results if row["batch"] == batch)
            behind.append(f"{cells[best_of, batch]['tokens_per_s'] / best - 1:+.1%}")
        result.rows.append([f"{best_of} against the best", *behind])
    return result


def main(
    bundle: BundleFolder,
    methods: Methods = None,
    auto_regressive: PlainBundle = None,
    best_of: Annotated[
        str | None, typer.Option(help="Compare this method with the best at each batch size; default: none.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the requests.")] = 0.0,
    batches: Concurrency = [1, 2, 4, 8, 16],
    prompts: PromptsFile = PROMPTS_FILE,
    num_prompts: FewPrompts = 48,
    max_tokens: MaxTokens = 64,
    rounds: Rounds = 2,
    fixed: FixedBudget = None,
    output: Report = Path("artifacts/reports/method_batches.json"),
) -> None:
    llm = load_llm(bundle)
    plain = load_llm(auto_regressive) if auto_regressive else llm
    for loaded in {llm, plain}:
        write_caches(loaded)
    chosen = list(dict.fromkeys([AUTO_REGRESSIVE, *methods_of(llm, methods)]))
    methods_of(llm, [best_of or AUTO_REGRESSIVE])
    if fixed:
        llm.runtime.fix_budget(methods=methods_of(llm, fixed or []))
    load = Workload.load(bundle, [llm, plain], prompts, num_prompts, batches, max_tokens, temperature)
    best = best_rounds(
        rounds,
        batches,
        chosen,
        lambda method, batch: load.answer(plain if method == AUTO_REGRESSIVE else llm, method, batch),
    )
    for loaded in {llm, plain}:
        loaded.close()
    results = list(best.values())
    report = {"prompts": len(load.requests), "auto_regressive": (auto_regressive or bundle).name}
    report |= {"max_tokens": max_tokens, "temperature": temperature, "rounds": rounds}
    finish(output, report | {"cells": results}, table(results, best_of))


if __name__ == "__main__":
    run(main)
