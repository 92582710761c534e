"""What prefix reuse saves and costs, in one process.

    python -m studies.cache.prefix_reuse --bundle BUNDLE

Three measurements:

- The next turn of a chat. Half of the history is the model's own sampled answers, as a client sends them back: as text.
- Turns after one system prompt, each from another user.
- Prompts that share nothing, in an LLM with reuse and in one without, which take turns.

The first two compare the time to the first token with that of the same request that reuses nothing (`cache_prompt`
false), summed over requests; the last is the median of the prompts' ratios. Times are those of the caller, with
encoding the text. Intervals are 95%, over requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import PROMPTS_FILE, BundleFolder, MaxTokens, PromptsFile, Report, Threads, console, run
from benchmarks.speed.inprocess import load_llm
from redraft.chat import ChatMessage
from redraft.console.progress import tracked
from redraft.llm import LLM, Answer
from redraft.loadtest.intervals import interval, ratio, resampled_prompts
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.loadtest.workload import ChatTokenizer, Passages
from redraft.prompts import load_prompts

PART = 125
"""Most tokens of an answer in a history."""
STRIDE = 997
"""Tokens between the places at which texts begin, so that no two begin alike."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of chats, turns and prompts, and tokens of each part."""

    chats: int
    history: int
    turn: int
    system: int
    turns: int
    prompts: int
    prompt: int
    max_tokens: int
    temperature: float


class Texts:
    """Texts of given lengths, each from another place of the prompts' file."""

    def __init__(self, passages: Passages):
        self._passages, self._place = passages, 0

    def next(self, tokens: int) -> str:
        """About so many tokens."""
        self._place += STRIDE
        return self._passages.take(tokens, self._place)

    def user(self, tokens: int) -> ChatMessage:
        """A user's turn of about so many tokens."""
        return {"role": "user", "content": self.next(tokens)}


def timed(act: Callable[[], Answer]) -> tuple[float, Answer]:
    """An answer, and the seconds that it took."""
    started = time.perf_counter()
    answer = act()
    return time.perf_counter() - started, answer


def history(
    llm: LLM, tokenizer: ChatTokenizer, texts: Texts, tokens: int, temperature: float, seed: int
) -> tuple[list[ChatMessage], float]:
    """A conversation of at least so many tokens, and the share of them that the model has written."""
    messages: list[ChatMessage] = []
    asked = answered = length = 0
    while length < tokens:
        turn = texts.user(max(answered - asked + PART, PART // 5))
        text, special = tokenizer.write([*messages, turn]), tokenizer.adds_special_tokens
        answer = llm.generate(text, PART, temperature=temperature, seed=seed, add_special_tokens=special)
        messages += [turn, {"role": "assistant", "content": answer.text}]
        asked, answered = asked + len(tokenizer.encode(turn["content"])), answered + len(answer.token_ids)
        length = len(tokenizer.encode(tokenizer.write(messages)))
    return messages, answered / length


def compared(llm: LLM, text: str, special: bool, first: bool) -> dict[str, float]:
    """Times to the first token of a chat's text, with reuse and without; `first`: in this order. `special`: the
    tokenizer adds its special tokens."""
    result: dict[str, float] = {}
    for reuses in (first, not first):
        seconds, answer = timed(partial(llm.generate, text, 1, cache_prompt=reuses, add_special_tokens=special))
        result["reused" if reuses else "anew"] = 1e3 * seconds
        if reuses:
            result["cached"], result["prompt"] = answer.stats.cached_tokens, answer.stats.prompt_tokens
    return result


def next_turns(llm: LLM, tokenizer: ChatTokenizer, texts: Texts, sizes: Sizes) -> list[dict[str, float]]:
    """The first turn after each of several histories."""
    pairs = []
    for index in tracked(range(sizes.chats), "next turns", "chats", console):
        messages, share = history(llm, tokenizer, texts, sizes.history, sizes.temperature, index)
        text = tokenizer.write([*messages, texts.user(sizes.turn)])
        pairs.append(compared(llm, text, tokenizer.adds_special_tokens, index % 2 == 0) | {"answered": share})
    return pairs


def after_system(llm: LLM, tokenizer: ChatTokenizer, texts: Texts, sizes: Sizes) -> list[dict[str, float]]:
    """Turns of several users after a system prompt that one has sent before them."""
    system: ChatMessage = {"role": "system", "content": texts.next(sizes.system)}
    prompts = [tokenizer.write([system, texts.user(sizes.turn)]) for _ in range(sizes.turns + 1)]
    llm.generate(prompts[0], 1, add_special_tokens=tokenizer.adds_special_tokens)
    return [
        compared(llm, text, tokenizer.adds_special_tokens, index % 2 == 0)
        for index, text in enumerate(tracked(prompts[1:], "after a system prompt", "turns", console))
    ]


def unshared(llms: dict[str, LLM], texts: Texts, sizes: Sizes) -> dict[str, list[dict[str, float]]]:
    """Times to the first token and per further token of prompts that share nothing, by LLM; all of a cache's slots
    hold an earlier one."""
    result: dict[str, list[dict[str, float]]] = {name: [] for name in llms}
    warm_up = max(llm.runtime.limits.slots for llm in llms.values())
    prompts = [texts.next(sizes.prompt) for _ in range(warm_up + sizes.prompts)]
    for index, text in enumerate(tracked(prompts, "nothing shared", "prompts", console)):
        for name in sorted(llms, reverse=index % 2 == 0):
            seconds, answer = timed(partial(llms[name].generate, text, sizes.max_tokens, end_id=-1))
            if index >= warm_up:
                decoded = answer.stats.decode_ms
                times = {"first": 1e3 * seconds - decoded, "further": decoded / max(sizes.max_tokens - 1, 1)}
                result[name].append(times)
    return result


def saved(pairs: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, and the ratio of summed times with and without reuse."""
    medians = {name: float(np.median([pair[name] for pair in pairs])) for name in pairs[0]}
    reused, anew = (np.array([pair[name] for pair in pairs]) for name in ("reused", "anew"))
    return {
        "medians": medians,
        "ratio": float(reused.sum() / anew.sum()),
        "interval": interval(ratio(reused, anew)),
        "requests": pairs,
    }


def table(report: dict[str, Any]) -> Table:
    """The report's ratios."""
    result = Table(
        "Time with prefix reuse over time without", ["", "ratio", "95%", "cached", "with, ms", "without, ms"]
    )
    for name in ("next turn", "system prompt"):
        entry, medians = report[name], report[name]["medians"]
        cached = f"{medians['cached']:.0f} of {medians['prompt']:.0f}"
        result.rows.append([name, *_ratio(entry), cached, f"{medians['reused']:.1f}", f"{medians['anew']:.1f}"])
    for name, entry in report["nothing shared"].items():
        result.rows.append([f"nothing shared, {name} token", *_ratio(entry), "0", "", ""])
    return result


def _ratio(entry: dict[str, Any]) -> list[str]:
    low, high = entry["interval"]
    return [f"{entry['ratio']:.1%}", f"{low:.1%} to {high:.1%}"]


def median_ratio(tops: np.ndarray, bottoms: np.ndarray) -> dict[str, Any]:
    """`ratio`, the median of the pairs' ratios (float [pairs] each), and its `interval`. One slow moment hardly
    moves it."""
    ratios = tops / bottoms
    medians = [np.median(np.repeat(ratios, draw)) for draw in resampled_prompts(len(ratios))]
    return {"ratio": float(np.median(ratios)), "interval": interval(np.array(medians))}


def main(
    bundle: BundleFolder,
    prompts: PromptsFile = PROMPTS_FILE,
    chats: Annotated[int, typer.Option(help="Chats whose next turn is measured.")] = 12,
    history: Annotated[int, typer.Option(help="Tokens before the next turn.")] = 1000,
    turn: Annotated[int, typer.Option(help="Tokens of a turn.")] = 20,
    system: Annotated[int, typer.Option("--system-tokens", help="Tokens of the system prompt.")] = 500,
    turns: Annotated[int, typer.Option(help="Turns after the system prompt.")] = 20,
    num_prompts: Annotated[int, typer.Option(help="Prompts that share nothing.")] = 48,
    prompt: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of each of these.")] = 256,
    max_tokens: MaxTokens = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the answers in a history.")] = 1.0,
    threads: Threads = None,
    output: Report = Path("artifacts/reports/prefix_reuse.json"),
) -> None:
    sizes = Sizes(chats, history, turn, system, turns, num_prompts, prompt, max_tokens, temperature)
    tokenizer, plain = ChatTokenizer(bundle), load_llm(bundle, threads)
    texts = Texts(Passages(load_prompts(prompts), tokenizer, seed=0))
    with plain, load_llm(bundle, threads, prefix_reuse=True) as llm:
        if (longest := history + 2 * PART + turn) > llm.runtime.limits.max_len:
            raise typer.BadParameter(f"--history {history}: expected a context of {longest} tokens or more")
        report: dict[str, Any] = {"bundle": bundle.name, "temperature": temperature}
        report["next turn"] = saved(next_turns(llm, tokenizer, texts, sizes))
        report["system prompt"] = saved(after_system(llm, tokenizer, texts, sizes))
        both = unshared({"with": llm, "without": plain}, texts, sizes)
    report["nothing shared"] = {
        kind: median_ratio(*(np.array([times[kind] for times in both[name]]) for name in ("with", "without")))
        for kind in ("first", "further")
    }
    finish(output, report, table(report))


if __name__ == "__main__":
    run(main)
