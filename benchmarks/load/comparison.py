"""Ways to decode that take turns at the same requests, so that a busy machine slows all alike, and their figures.

Intervals are 95%, over prompts (see `redraft.loadtest.intervals`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import numpy as np

from benchmarks.speed.acceptance import acceptance_figures
from benchmarks.speed.inprocess import Clock, timed
from redraft.llm import LLM, Answer
from redraft.loadtest.intervals import MOST_RUNS, interval, over_runs, ratio
from redraft.prompts import Prompt
from redraft.request import GenerateRequest

AR = "auto-regressive"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def kinds_of(prompts: list[Prompt]) -> list[str]:
    """Each prompt's kind: its category, but MT-bench's eight are one where a file has others too (Spec-Bench)."""
    alone = all(prompt.category in MT_BENCH for prompt in prompts)
    return [prompt.category if alone or prompt.category not in MT_BENCH else "mt_bench" for prompt in prompts]


class Decoder(Protocol):
    """A way to decode that is compared with others."""

    def run(self, requests: list[GenerateRequest]) -> tuple[list[Answer], Clock]:
        """Answers, and what they took."""


@dataclass(frozen=True)
class LLMDecoder:
    """An LLM and the method that its requests name: a `Decoder`."""

    llm: LLM
    method: str | None = None

    def run(self, requests: list[GenerateRequest], concurrency: int = 1) -> tuple[list[Answer], Clock]:
        """See `Decoder.run`; `concurrency` of them in flight."""
        own = [request.model_copy(update={"method": self.method}) for request in requests]
        return timed(self.llm, own, concurrency)


@dataclass
class Contender:
    """One way to decode: its answers and, per repeat, seconds of each prompt; the clock covers all of them."""

    name: str
    seconds: list[list[float]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)

    @property
    def tokens(self) -> int:
        """Output tokens of one repeat."""
        return sum(len(answer.token_ids) for answer in self.answers)

    def prompt_seconds(self) -> list[float]:
        """Median seconds of each prompt."""
        return [median(values) for values in zip(*self.seconds, strict=True)]

    def speed(self) -> float:
        """Output tokens per second, prefill included."""
        return self.tokens / sum(self.prompt_seconds())

    def decode_speed(self) -> float | None:
        """Output tokens per second after the first token of each answer; last repeat."""
        decode_s = sum(answer.stats.decode_ms for answer in self.answers) / 1e3
        return sum(max(len(answer.token_ids) - 1, 0) for answer in self.answers) / decode_s if decode_s else None


def compare(
    decoders: Mapping[str, Decoder],
    requests: list[GenerateRequest],
    repeats: int,
    tick: Callable[[], None],
) -> dict[str, Contender]:
    """Let every decoder answer every request, taking turns in alternating order, after the first one to warm up."""
    contenders = {name: Contender(name) for name in decoders}
    for repeat in range(repeats):
        for decoder in decoders.values():
            decoder.run(requests[:1])
        for contender in contenders.values():
            contender.seconds.append([])
            contender.answers = []
        for index, generation in enumerate(requests):
            order = list(contenders.values())
            for contender in order if (index + repeat) % 2 == 0 else reversed(order):
                (answer,), took = decoders[contender.name].run([generation])
                contender.clock = contender.clock.plus(took)
                contender.seconds[-1].append(answer.seconds)
                contender.answers.append(answer)
                tick()
    return contenders


def report_single(contenders: dict[str, Contender], prompts: list[Prompt]) -> dict[str, Any]:
    """Figures of a comparison: speeds, speed-ups, acceptance (all also per kind of prompt), how far a method's is below
    the first one's, and where the time went. Peers, which have no steps of ours, have speeds only; where there are any,
    each of ours has its speed over the fastest one's too."""
    base = contenders[AR]
    peers = [contender for contender in contenders.values() if not contender.clock.steps]
    fastest = max(peers, key=Contender.speed, default=None)
    first = next((contender for name, contender in contenders.items() if name != AR), base)
    indices_of: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds_of(prompts)):
        indices_of.setdefault(kind, []).append(index)
    report: dict[str, Any] = {"prompts": len(prompts), "contenders": {}}
    for name, contender in contenders.items():
        entry: dict[str, Any] = {
            "tokens": contender.tokens,
            "tokens_per_s": contender.speed(),
            "decode_tokens_per_s": contender.decode_speed(),
            "speedup": contender.speed() / base.speed(),
            "speedup_interval": interval(resampled_speeds(contender) / resampled_speeds(base)),
        }
        report["contenders"][name] = entry
        if contender in peers:
            continue
        if fastest:
            entry["over_peer"] = contender.speed() / fastest.speed()
            entry["over_peer_interval"] = interval(resampled_speeds(contender) / resampled_speeds(fastest))
        entry |= {"drafting_share": contender.clock.drafting_share, "host_overhead": contender.clock.host_overhead}
        entry |= acceptance_figures(contender.answers)
        acceptance = resampled_acceptance(contender)
        entry["acceptance_interval"] = interval(acceptance)
        entry["acceptance_below_first_interval"] = interval(resampled_acceptance(first) - acceptance)
        pairs = zip(base.answers, contender.answers, strict=True)
        entry["identical_answers"] = sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
        entry["categories"] = {
            kind: {
                "speedup": _part_speed(contender, indices) / _part_speed(base, indices),
                "acceptance_length": acceptance_figures([contender.answers[i] for i in indices])["acceptance_length"],
            }
            for kind, indices in indices_of.items()
        }
    if fastest:
        report["fastest_peer"] = fastest.name
    return report


def resampled_speeds(contender: Contender) -> np.ndarray:
    """Its speed over each re-sample of the prompts, float64 [RESAMPLES]."""
    tokens = np.array([len(answer.token_ids) for answer in contender.answers])
    return ratio(tokens, np.array(contender.prompt_seconds()))


def resampled_acceptance(contender: Contender) -> np.ndarray:
    """Its tokens per step over each re-sample of the prompts, float64 [RESAMPLES]."""
    stats = [answer.stats for answer in contender.answers]
    accepted, steps = (np.array([getattr(item, key) for item in stats]) for key in ("accepted", "steps"))
    return 1 + ratio(accepted, steps)


def _part_speed(contender: Contender, indices: list[int]) -> float:
    seconds = contender.prompt_seconds()
    return sum(len(contender.answers[i].token_ids) for i in indices) / sum(seconds[i] for i in indices)


def compare_concurrent(
    decoders: dict[str, LLMDecoder],
    requests: list[GenerateRequest],
    level: int,
    repeats: int,
    tick: Callable[[], None],
) -> dict[str, Any]:
    """Throughput with `level` streams at once, each decoder in turn: medians of the repeats, and the speed-up's
    interval over at most ten of them, where there are two or more."""
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    answers: dict[str, list[Answer]] = {}
    for repeat in range(repeats):
        for name in list(decoders) if repeat % 2 == 0 else reversed(list(decoders)):
            decoders[name].run(requests[:1])
            answers[name], took = decoders[name].run(requests, level)
            speeds[name].append(sum(len(answer.token_ids) for answer in answers[name]) / took.wall_s)
            tick()
    contenders = {}
    for name, values in speeds.items():
        speedups = [ours / base for ours, base in zip(values, speeds[AR], strict=True)]
        contenders[name] = {
            "tokens_per_s": median(values),
            "speedup": median(speedups),
            "acceptance_length": acceptance_figures(answers[name])["acceptance_length"],
        }
        mean, half = over_runs(speedups[:MOST_RUNS])
        if half is not None:
            contenders[name]["speedup_interval"] = [mean - half, mean + half]
    return {"streams": level, "requests": len(requests), "contenders": contenders}
