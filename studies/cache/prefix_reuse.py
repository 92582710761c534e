"""What prefix reuse saves and costs, in one process.

    python -m studies.cache.prefix_reuse --bundle BUNDLE
    python -m studies.cache.prefix_reuse --bundle BUNDLE --other METHOD ...

Three measurements:

- The next turn of a chat. Half of the history is the model's own sampled answers, as a client sends them back: as text.
- Turns after one system prompt, each from another user.
- Prompts that share nothing, in an LLM with reuse and in one without, which take turns.

The first two compare the time to the first token with that of the same request that reuses nothing (`cache_prompt`
false), summed over requests; the last is the median of the prompts' ratios. Times are those of the caller, with
encoding the text. Intervals are 95%, over requests.

With --other only the next turns of chats are measured, each answered by another method than the history. A drafter with
a context then begins without one where rows are reused: what that costs its drafts, and what it saves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.figures.intervals import interval, median_ratio, ratio
from benchmarks.figures.results import save_report
from benchmarks.figures.tables import Table
from benchmarks.load.workload import ChatTokenizer, Passages
from benchmarks.speed.inprocess import load_llm
from redraft.chat import Message
from redraft.console.progress import tracked
from redraft.llm import LLM, Answer
from redraft.prompts import load_prompts

PART = 125
"""Most tokens of an answer in a history."""
STRIDE = 997
"""Tokens between the places at which texts begin, so that no two begin alike."""

console = Console()


class Texts:
    """Texts of given lengths, each from another place of the prompts' file."""

    def __init__(self, passages: Passages):
        self._passages, self._place = passages, 0

    def next(self, tokens: int) -> str:
        """About so many tokens."""
        self._place += STRIDE
        return self._passages.take(tokens, self._place)

    def user(self, tokens: int) -> Message:
        """A user's turn of about so many tokens."""
        return {"role": "user", "content": self.next(tokens)}


def timed(act: Callable[[], Answer]) -> tuple[float, Answer]:
    """An answer, and the seconds that it took."""
    started = time.perf_counter()
    answer = act()
    return time.perf_counter() - started, answer


def history(
    llm: LLM, tokenizer: ChatTokenizer, texts: Texts, tokens: int, temperature: float, seed: int
) -> tuple[list[Message], float]:
    """A conversation of at least so many tokens, and the share of them that the model has written."""
    messages: list[Message] = []
    asked = answered = length = 0
    while length < tokens:
        turn = texts.user(max(answered - asked + PART, PART // 5))
        answer = llm.generate(tokenizer.write([*messages, turn]), PART, temperature=temperature, seed=seed)
        messages += [turn, {"role": "assistant", "content": answer.text}]
        asked, answered = asked + len(tokenizer.encode(turn["content"])), answered + len(answer.token_ids)
        length = len(tokenizer.encode(tokenizer.write(messages)))
    return messages, answered / length


def compared(llm: LLM, text: str, first: bool) -> dict[str, float]:
    """Times to a prompt's first token, with reuse and without; `first`: in this order."""
    found: dict[str, float] = {}
    for reuses in (first, not first):
        seconds, answer = timed(lambda reuses=reuses: llm.generate(text, 1, cache_prompt=reuses))  # type: ignore[misc]
        found["reused" if reuses else "anew"] = 1e3 * seconds
        if reuses:
            found["cached"], found["prompt"] = answer.stats.cached_tokens, answer.stats.prompt_tokens
    return found


def next_turns(llm: LLM, tokenizer: ChatTokenizer, texts: Texts, args: argparse.Namespace) -> list[dict[str, float]]:
    """The first turn after each of several histories."""
    pairs = []
    for place in tracked(range(args.chats), "next turns", "chats", console):
        messages, share = history(llm, tokenizer, texts, args.history, args.temperature, place)
        time.sleep(args.pause)
        text = tokenizer.write([*messages, texts.user(args.turn)])
        pairs.append(compared(llm, text, place % 2 == 0) | {"answered": share})
    return pairs


def after_system(llm: LLM, tokenizer: ChatTokenizer, texts: Texts, args: argparse.Namespace) -> list[dict[str, float]]:
    """Turns of several users after a system prompt that one has sent before them."""
    system: Message = {"role": "system", "content": texts.next(args.system)}
    prompts = [tokenizer.write([system, texts.user(args.turn)]) for _ in range(args.turns + 1)]
    llm.generate(prompts[0], 1)
    return [
        compared(llm, text, place % 2 == 0)
        for place, text in enumerate(tracked(prompts[1:], "after a system prompt", "turns", console))
    ]


def by_another_method(
    llm: LLM, tokenizer: ChatTokenizer, texts: Texts, args: argparse.Namespace, method: str
) -> list[dict[str, float]]:
    """Milliseconds and tokens per step of next turns' answers by a method, with reuse and without."""
    found = []
    for place in tracked(range(args.chats), f"next turns by {method}", "chats", console):
        messages, _ = history(llm, tokenizer, texts, args.history, args.temperature, place)
        text, row = tokenizer.write([*messages, texts.user(args.turn)]), dict[str, float]()
        for reuses in (True, False):
            seconds, answer = timed(
                lambda text=text, reuses=reuses: llm.generate(  # type: ignore[misc]
                    text, args.max_tokens, end_id=-1, method=method, cache_prompt=reuses
                )
            )
            stats, name = answer.stats, "reused" if reuses else "anew"
            row |= {name: 1e3 * seconds, f"{name}, tokens/step": 1 + stats.accepted / stats.steps}
            row |= {"cached": stats.cached_tokens, "prompt": stats.prompt_tokens} if reuses else {}
        found.append(row)
    return found


def unshared(llms: dict[str, LLM], texts: Texts, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Times to the first token and per further token of prompts that share nothing, by LLM; all of a cache's slots
    hold an earlier one."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in llms}
    warm_up = max(llm.runtime.limits.slots for llm in llms.values())
    prompts = [texts.next(args.prompt) for _ in range(warm_up + args.prompts)]
    for place, text in enumerate(tracked(prompts, "nothing shared", "prompts", console)):
        for name in sorted(llms, reverse=place % 2 == 0):
            options: dict[str, Any] = {"end_id": -1, "method": args.method}
            seconds, answer = timed(lambda llm=llms[name]: llm.generate(text, args.max_tokens, **options))  # type: ignore[misc] # noqa: B023
            if place >= warm_up:
                decoded = answer.stats.decode_ms
                times = {"first": 1e3 * seconds - decoded, "further": decoded / max(args.max_tokens - 1, 1)}
                found[name].append(times)
    return found


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
    shown = Table("Time with prefix reuse over time without", ["", "ratio", "95%", "cached", "with, ms", "without, ms"])
    for name in ("next turn", "system prompt"):
        one, medians = report[name], report[name]["medians"]
        cached = f"{medians['cached']:.0f} of {medians['prompt']:.0f}"
        shown.rows.append([name, *_ratio(one), cached, f"{medians['reused']:.1f}", f"{medians['anew']:.1f}"])
    for name, one in report["nothing shared"].items():
        shown.rows.append([f"nothing shared, {name} token", *_ratio(one), "0", "", ""])
    return shown


def other_table(report: dict[str, Any]) -> Table:
    """Next turns by other methods."""
    names = ["method", "time, ratio", "95%", "cached", "with, ms", "without, ms", "tokens/step with", "without"]
    shown = Table("Next turns by another method than the history's", names)
    for method, one in report["other methods"].items():
        medians = one["medians"]
        cells = [f"{medians['cached']:.0f} of {medians['prompt']:.0f}"]
        cells += [f"{medians[name]:.0f}" for name in ("reused", "anew")]
        cells += [f"{medians[f'{name}, tokens/step']:.2f}" for name in ("reused", "anew")]
        shown.rows.append([method, *_ratio(one), *cells])
    return shown


def _ratio(one: dict[str, Any]) -> list[str]:
    low, high = one["interval"]
    return [f"{one['ratio']:.1%}", f"{low:.1%} to {high:.1%}"]


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--bundle", type=Path, required=True)
    add("--dataset", type=Path, default=Path("benchmarks/prompts.jsonl"), help="where texts are taken from")
    add("--threads", type=int)
    add("--method", help="of all requests that share nothing; default: the bundle's first")
    add("--other", nargs="+", help="measure only next turns by these methods, after histories by the bundle's first")
    add("--temperature", type=float, default=1.0, help="of the answers in a history")
    add("--chats", type=int, default=12)
    add("--history", type=int, default=1000, help="tokens before the next turn")
    add("--turn", type=int, default=20, help="tokens of a turn")
    add("--pause", type=float, default=0.0, help="seconds between an answer and the next turn")
    add("--system", type=int, default=500, help="tokens of the system prompt")
    add("--turns", type=int, default=20, help="after it")
    add("--prompts", type=int, default=48, help="that share nothing")
    add("--prompt", type=int, default=256, help="tokens of each")
    add("--max-tokens", type=int, default=64, help="of their answers")
    add("--output", type=Path, default=Path("docs/results/prefix_reuse.json"))
    args = parser.parse_args(argv)
    tokenizer, plain = ChatTokenizer(args.bundle), load_llm(parser, args.bundle, args.threads)
    texts = Texts(Passages(load_prompts(args.dataset), tokenizer, seed=0))
    named = {"bundle": args.bundle.name, "temperature": args.temperature}
    with plain, LLM(args.bundle, args.threads) as llm:
        if (longest := args.history + 2 * PART + args.turn) > llm.runtime.limits.max_len:
            parser.error(f"--history {args.history}: expected a context of {longest} tokens or more")
        if args.other:
            others = {name: saved(by_another_method(llm, tokenizer, texts, args, name)) for name in args.other}
            return finish(named | {"other methods": others}, other_table, args.output)
        report = {
            "next turn": saved(next_turns(llm, tokenizer, texts, args)),
            "system prompt": saved(after_system(llm, tokenizer, texts, args)),
        }
        both = unshared({"with": llm, "without": plain}, texts, args)
    report["nothing shared"] = {
        kind: median_ratio(*(np.array([times[kind] for times in both[name]]) for name in ("with", "without")))
        for kind in ("first", "further")
    }
    return finish(named | report, table, args.output)


def finish(report: dict[str, Any], shown: Callable[[dict[str, Any]], Table], output: Path) -> None:
    """Print the table and write JSON."""
    shown(report).show(console)
    save_report(output, report)
    console.print(f"written to {output}")


if __name__ == "__main__":
    main()
