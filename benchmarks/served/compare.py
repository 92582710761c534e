"""Conversations that repeat, served with drafts from all that was served before, and without.

    python -m benchmarks.served.compare --bundle BUNDLE
    python -m benchmarks.served.compare --bundle BUNDLE --prompts mt_bench.jsonl --output mt_bench.json

Three workloads: edits of the same files of code in several turns, questions about the same documents, and a tool loop.
Their conversations differ, in what is asked or in which order. Engines of one bundle serve them, one at a time: each
conversation is served by all before the next begins, so that a busy machine slows all alike. A third engine, without
texts like the first, is a control: where it is not as fast, the machine is why. All reuse prefixes and choose their
budgets, as a server does. A workload begins with nothing stored. All texts must be the same.

A figure is the seconds without over the seconds with, of all conversations, and an interval of 95% over conversations.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import BundleFolder, MaxTokens, NumPrompts, Report, Threads, console, run
from benchmarks.speed.inprocess import write_caches
from redraft.chat import ChatMessage
from redraft.console.progress import tracked
from redraft.drafting.served import ServedTexts, TextOptions
from redraft.llm import LLM
from redraft.loadtest.intervals import interval, ratio
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.loadtest.workload import ChatTokenizer
from redraft.prompts import Prompt, load_prompts, spread
from redraft.runtime import Runtime

WORKLOADS = [Path(__file__).with_name(f"{name}.jsonl") for name in ("edits", "documents", "tools")]
OPTIONS = TextOptions(by_key=True, capacity=1 << 20)


@dataclass
class Served:
    """What an engine took for conversations."""

    llm: LLM
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    answers: list[list[int]] = field(default_factory=list)

    def serve(self, tokenizer: ChatTokenizer, prompt: Prompt, max_tokens: int) -> None:
        """Serve a conversation turn by turn."""
        started, messages = time.perf_counter(), list[ChatMessage]()
        for turn in prompt.turns:
            messages.append({"role": "user", "content": turn})
            request = tokenizer.request_of(messages, max_tokens)
            answer = self.llm.run([request])[0]
            messages.append({"role": "assistant", "content": answer.text})
            self.answers.append(answer.token_ids)
            self.tokens += answer.stats.output_tokens
            self.steps += answer.stats.steps
        self.seconds.append(time.perf_counter() - started)


def compare(llms: Sequence[LLM], bundle: Path, prompts: Sequence[Prompt], max_tokens: int) -> dict[str, Any]:
    """The figures of a workload, served by an engine without texts, one with them and another without."""
    for llm in llms:
        if llm.runtime.texts is not None:
            llm.runtime.texts = ServedTexts(OPTIONS)
        llm.runtime.with_methods(llm.runtime.methods)
    tokenizer = ChatTokenizer(bundle)
    without, with_texts, control = served = [Served(llm) for llm in llms]
    for index, prompt in enumerate(prompts):
        for one in served if index % 2 else reversed(served):
            one.serve(tokenizer, prompt, max_tokens)
    tops = np.array(without.seconds)
    return {
        "conversations": len(prompts),
        "tokens": without.tokens,
        "identical": without.answers == with_texts.answers == control.answers,
        **_speed_up(tops, with_texts),
        "control": _speed_up(tops, control),
        "tokens_per_step": with_texts.tokens / with_texts.steps,
        "without_tokens_per_step": without.tokens / without.steps,
        "without_tokens_per_s": without.tokens / tops.sum(),
    }


def _speed_up(seconds: np.ndarray, served: Served) -> dict[str, Any]:
    others = np.array(served.seconds)
    return {"speed_up": seconds.sum() / others.sum(), "interval": list(interval(ratio(seconds, others)))}


def table(results: dict[str, dict[str, Any]]) -> Table:
    """A workload a row."""
    result = Table(
        "Served texts as drafts, over the same engine without them",
        ["workload", "conversations", "speed-up", "control", "tokens/step", "without"],
    )
    for name, figures in results.items():
        result.rows.append(
            [
                name,
                str(figures["conversations"]),
                *(
                    "{:.2f}x ({:.2f} to {:.2f})".format(part["speed_up"], *part["interval"])
                    for part in (figures, figures["control"])
                ),
                f"{figures['tokens_per_step']:.2f}",
                f"{figures['without_tokens_per_step']:.2f}",
            ]
        )
    return result


def main(
    bundle: BundleFolder,
    files: Annotated[
        list[Path],
        typer.Option(
            "--prompts", metavar="FILE", help="Conversations; default: the three workloads.", show_default=False
        ),
    ] = WORKLOADS,
    count: NumPrompts = None,
    max_tokens: MaxTokens = 160,
    threads: Threads = None,
    output: Report = Path("artifacts/reports/served_texts.json"),
) -> None:
    llms = [LLM(Runtime.load(bundle, threads, texts=texts)) for texts in (None, OPTIONS, None)]
    if llms[1].runtime.texts is None:
        raise typer.BadParameter(f"no method of {bundle} drafts by n-grams, with which served texts join")
    for llm in llms:
        write_caches(llm)
    results = {}
    for file in tracked(files, "serving", "workloads", console):
        prompts = spread(load_prompts(file, all_turns=True), count)
        results[file.stem] = compare(llms, bundle, prompts, max_tokens)
    for llm in llms:
        llm.close()
    report = {"bundle": bundle.name, "max_tokens": max_tokens, "workloads": results}
    finish(output, report, table(results))


if __name__ == "__main__":
    run(main)
