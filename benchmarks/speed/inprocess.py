"""What the benchmarks measure of an `LLM`: where the time of its requests goes, and the target's logits of a text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import typer

from redraft.batch import TargetBatch
from redraft.decoding.token_tree import mask_width
from redraft.engines.features import on_host
from redraft.llm import LLM, Answer
from redraft.request import AUTO_REGRESSIVE, GenerateRequest, InvalidRequest


@dataclass
class Clock:
    """Seconds, and steps of the scheduler."""

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


def load_llm(bundle: Path, threads: int | None = None, prefix_reuse: bool = False) -> LLM:
    """Load an LLM for a command; times want no prefix reuse. Raises typer.BadParameter for a bundle that cannot be
    loaded."""
    try:
        return LLM(bundle, threads, prefix_reuse=prefix_reuse)
    except (RuntimeError, ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


def write_caches(llm: LLM) -> None:
    """Write all rows of all slots, before anything is timed: the system gives memory when rows are first written, and
    who decodes first would look slow."""
    slots = range(llm.runtime.limits.slots)
    if llm.runtime.engine.reuse_refusal is None:
        for slot in slots:
            llm.runtime.engine.copy(slots[slot - 1], slot, llm.runtime.limits.max_len)


def methods_of(llm: LLM, names: Sequence[str] | None) -> list[str]:
    """Return these methods of a bundle; None or `all`: all of them. Raises typer.BadParameter for others."""
    methods = list(llm.runtime.methods)
    if names is None or list(names) == ["all"]:
        return methods
    if unknown := set(names) - {*methods, AUTO_REGRESSIVE}:
        raise typer.BadParameter(f"the bundle has no method {', '.join(sorted(unknown))}; it has {', '.join(methods)}")
    return list(names)


def timed(llm: LLM, requests: Sequence[GenerateRequest], concurrency: int = 1) -> tuple[list[Answer], Clock]:
    """`LLM.run`, and what it took."""
    before, started = read_clock(llm), time.perf_counter()
    answers = llm.run(requests, concurrency)
    wall_s = time.perf_counter() - started
    return answers, read_clock(llm).since(before).plus(Clock(wall_s=wall_s))


def read_clock(llm: LLM) -> Clock:
    """Readings since the drafting plans were set, without the wall time; take two and subtract."""
    totals, engine = llm.runtime.scheduler.totals, llm.runtime.scheduler.clock
    return Clock(0.0, totals.step_s, engine.target_s, engine.draft_s, totals.steps)


def require_fit(llm: LLM, requests: Iterable[GenerateRequest], prompts: Path) -> None:
    """Raises typer.BadParameter for a request of this file of prompts that the bundle cannot answer."""
    try:
        for request in requests:
            llm.runtime.sequence(0, request)
    except InvalidRequest as error:
        raise typer.BadParameter(f"{prompts}: {error}") from None


def teacher_force(llm: LLM, token_ids: Sequence[int], first: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Run a text through the target, in prefill chunks; per chunk, for each row from place `first` on, the logits
    float32 [n, V] and, where the bundle drafts, the features float32 [n, F], as copies.

    Nothing may be running: slot 0 is used. Raises ValueError if the text is longer than the context.
    """
    limits, ids = llm.runtime.limits, np.asarray(token_ids, np.int32)
    if len(ids) > limits.max_len:
        raise ValueError(f"{len(ids)} tokens do not fit the context of {limits.max_len}")
    for start in range(0, len(ids), limits.prefill_chunk):
        rows = ids[start : start + limits.prefill_chunk]
        wanted = np.arange(max(first - start, 0), len(rows), dtype=np.int32)
        logits, features = forward(llm, rows, start, wanted if len(wanted) else np.zeros(1, np.int32))
        if len(wanted):
            yield logits.copy(), None if features is None else features[wanted].copy()


def forward(llm: LLM, rows: np.ndarray, start: int, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """One target forward of a chain of rows int32 [T] after the first `start` rows of slot 0: logits of the rows
    `wanted` int32 and features of all, valid until the next call of the engine."""
    words = mask_width(llm.runtime.limits.max_tree)
    batch = TargetBatch.chains(rows[None], np.zeros(1), np.array([start]), words, wanted)
    logits, features = llm.runtime.engine.execute(batch)
    return np.asarray(logits), None if features is None else on_host(features)
