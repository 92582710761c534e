"""A bundle run inside this process: what the single-stream benchmarks measure on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from redraft.batch import TargetBatch
from redraft.decoding.token_tree import mask_width
from redraft.engines.hidden import on_host
from redraft.method import MethodPlan
from redraft.request import GenerateRequest, SamplingConfig, SequenceStats
from redraft.runtime import Runtime


@dataclass
class Answer:
    """A finished request: its tokens (end token left out), statistics and seconds from submission to end."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    stats: SequenceStats = field(default_factory=SequenceStats)
    seconds: float = 0.0


@dataclass
class Clock:
    """Seconds and calls since the start of a session."""

    wall_s: float = 0.0
    step_s: float = 0.0
    target_s: float = 0.0
    draft_s: float = 0.0
    steps: int = 0

    def since(self, before: Clock) -> Clock:
        """What was added after `before`."""
        return Clock(**{name: value - getattr(before, name) for name, value in vars(self).items()})

    def plus(self, other: Clock) -> Clock:
        """Both together."""
        return Clock(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def drafting_share(self) -> float:
        """Part of the steps' time spent in the drafter's network."""
        return self.draft_s / self.step_s if self.step_s else 0.0

    @property
    def host_overhead(self) -> float:
        """Part of the steps' time spent outside the engine."""
        return 1 - (self.target_s + self.draft_s) / self.step_s if self.step_s else 0.0


class Session:
    """A runtime whose requests run here, several at a time, until all are answered."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._wall_s = 0.0

    @classmethod
    def load(cls, bundle: Path, threads: int | None = None) -> Session:
        """Load a bundle. Raises as `Runtime.load`."""
        return cls(Runtime.load(bundle, threads))

    def use_plans(self, plans: Mapping[str, MethodPlan]) -> None:
        """Draft by other plans from now on; the first is the default."""
        self.runtime.with_plans(plans)
        self._wall_s = 0.0

    def clock(self) -> Clock:
        """Readings since the plans were set; take two and subtract."""
        totals, engine = self.runtime.scheduler.totals, self.runtime.scheduler.clock
        return Clock(self._wall_s, totals.step_s, engine.target_s, engine.draft_s, totals.steps)

    def require_fit(self, texts: Sequence[str], max_tokens: int) -> None:
        """Raises InvalidRequest for a prompt that the bundle cannot answer with so many tokens."""
        for text in texts:
            self.runtime.sequence(0, request(text, max_tokens))

    def run(self, requests: Sequence[GenerateRequest], concurrency: int = 1) -> list[Answer]:
        """Answers in the requests' order, `concurrency` of them in flight as long as there are enough."""
        scheduler, answers = self.runtime.scheduler, [Answer() for _ in requests]
        started, sent = [0.0] * len(requests), 0
        begin, in_flight = time.perf_counter(), 0
        while in_flight or sent < len(requests):
            while in_flight < concurrency and sent < len(requests):
                started[sent] = time.perf_counter()
                scheduler.submit(self.runtime.sequence(sent, requests[sent]))
                in_flight, sent = in_flight + 1, sent + 1
            for output in scheduler.step():
                answer = answers[int(output.key)]  # type: ignore[call-overload]
                answer.token_ids += output.token_ids
                answer.text += output.text
                if output.finish_reason:
                    answer.finish_reason, answer.stats = output.finish_reason, output.stats or SequenceStats()
                    answer.seconds = time.perf_counter() - started[int(output.key)]  # type: ignore[call-overload]
                    in_flight -= 1
        self._wall_s += time.perf_counter() - begin
        return answers

    def teacher_force(self, token_ids: Sequence[int], first: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Run a text through the target, in prefill chunks; per chunk, for each row from place `first` on, the logits
        float32 [n, V] and, where the bundle drafts, the hidden states float32 [n, H], as copies.

        Nothing may be running: slot 0 is used. Raises ValueError if the text is longer than the context.
        """
        limits, ids = self.runtime.limits, np.asarray(token_ids, np.int32)
        if len(ids) > limits.max_len:
            raise ValueError(f"{len(ids)} tokens do not fit the context of {limits.max_len}")
        for start in range(0, len(ids), limits.prefill_chunk):
            rows = ids[start : start + limits.prefill_chunk]
            wanted = np.arange(max(first - start, 0), len(rows), dtype=np.int32)
            logits, hidden = self.forward(rows, start, wanted if len(wanted) else np.zeros(1, np.int32))
            if len(wanted):
                yield logits.copy(), None if hidden is None else hidden[wanted].copy()

    def forward(self, rows: np.ndarray, start: int, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """One target forward of a chain of rows int32 [T] behind the first `start` rows of slot 0: logits of the rows
        `wanted` int32 and hidden states of all, valid until the next call of the engine."""
        words = mask_width(self.runtime.limits.max_tree)
        batch = TargetBatch.chains(rows[None], np.zeros(1), np.array([start]), words, wanted)
        logits, hidden = self.runtime.engine.execute(batch)
        return np.asarray(logits), None if hidden is None else on_host(hidden)


def load_session(parser: argparse.ArgumentParser, bundle: Path, threads: int | None = None) -> Session:
    """`Session.load` for a command: a bundle that cannot be loaded ends it with the reason."""
    try:
        return Session.load(bundle, threads)
    except (RuntimeError, ValueError, OSError) as error:
        parser.error(str(error))


def request(
    text: str, max_tokens: int, bad_words: Sequence[str] = (), method: str | None = None, **sampling: float | int
) -> GenerateRequest:
    """A request for a session; `sampling` as in SamplingConfig."""
    config = SamplingConfig(**sampling)  # type: ignore[arg-type]
    words = list(bad_words)
    return GenerateRequest(id="r", text=text, max_tokens=max_tokens, sampling=config, bad_words=words, method=method)
