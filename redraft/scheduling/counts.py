"""What the scheduler counts: the engine's metrics, and their sums by the names that tools in the same process read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from redraft import metrics
from redraft.metrics import Metric, Metrics
from redraft.request import SequenceStats
from redraft.request_state import Gain

_TOTALS: dict[str, Metric[Any]] = {
    "requests": metrics.REQUESTS,
    "steps": metrics.STEPS,
    "sequence_steps": metrics.SEQUENCE_STEPS,
    "prompt_tokens": metrics.PROMPT_TOKENS,
    "prefix_cache_queries": metrics.CACHE_QUERIES,
    "prefix_cache_hits": metrics.CACHE_HITS,
    "output_tokens": metrics.GENERATION_TOKENS,
    "drafted": metrics.DRAFT_TOKENS,
    "accepted": metrics.ACCEPTED_TOKENS,
    "reused": metrics.REUSED_TOKENS,
    "rows_executed": metrics.ROWS,
    "step_s": metrics.STEP_TIME,
    "engine_s": metrics.ENGINE_TIME,
    "draft_s": metrics.DRAFT_TIME,
}


MOST_NOTED = 1024
"""Notes that are kept before they are counted, in one step."""


class Totals:
    """Sums since the start, each read from its metric when it is asked for: `totals.accepted`, `totals.step_s`."""

    def __init__(self, values: Metrics):
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name not in _TOTALS:
            raise AttributeError(name)
        total = self._values.total(_TOTALS[name])
        return total if name.endswith("_s") else int(total)

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Names and values, for `dict`."""
        return ((name, getattr(self, name)) for name in _TOTALS)


class EngineMetrics(Metrics):
    """The metrics of one engine. Each end that a request can have has a series from the start.

    What happens in every step is noted, and counted before somebody reads, or when much has been noted: counting takes
    locks, and at small batches as long as all else that a step does on the host.
    """

    def __init__(self) -> None:
        super().__init__(metrics.ENGINE)
        self._gains: defaultdict[str, list[Gain]] = defaultdict(list)
        self._gaps: list[float] = []
        self._steps: list[tuple[float, float, float]] = []
        for reason in metrics.FINISH_REASONS:
            self[metrics.ENDED].labels(reason)

    def total(self, entry: Metric[Any]) -> float:
        """See `Metrics.total`."""
        self._count()
        return super().total(entry)

    def page(self) -> bytes:
        """See `Metrics.page`."""
        self._count()
        return super().page()

    def note_step(self, step_s: float, engine_s: float, draft_s: float) -> None:
        """Note a step: its wall time, the part inside of the engine, and the part of that inside of drafters."""
        self._steps.append((step_s, engine_s, draft_s))
        if len(self._steps) + len(self._gaps) > MOST_NOTED:
            self._count()

    def note_gain(self, method: str, gain: Gain, gap_s: float) -> None:
        """Note what a step gained a sequence, so long after its last one."""
        self._gains[method].append(gain)
        self._gaps.append(gap_s)

    def count_end(self, reason: str, stats: SequenceStats) -> None:
        """Count a request that has ended, and the times that it took."""
        self[metrics.ENDED].labels(reason).inc()
        self[metrics.QUEUE_TIME].observe(stats.queue_ms / 1e3)
        if not stats.output_tokens:
            return
        first = stats.queue_ms + stats.prefill_ms
        self[metrics.FIRST_TOKEN_TIME].observe(first / 1e3)
        self[metrics.REQUEST_TIME].observe((first + stats.decode_ms) / 1e3)
        if stats.output_tokens > 1:
            self[metrics.PER_TOKEN_TIME].observe(stats.decode_ms / 1e3 / (stats.output_tokens - 1))

    def _count(self) -> None:
        steps, self._steps = self._steps, []
        self[metrics.STEPS].inc(len(steps))
        times = metrics.STEP_TIME, metrics.ENGINE_TIME, metrics.DRAFT_TIME
        for entry, seconds in zip(times, zip(*steps, strict=True), strict=False):
            self[entry].inc(sum(seconds))
        gaps, self._gaps = self._gaps, []
        self[metrics.STEP_GAP].observe_all(gaps)
        gains, self._gains = self._gains, defaultdict(list)
        for method, noted in gains.items():
            output_tokens, drafted, accepted, reused, rows = zip(*noted, strict=True)
            self[metrics.SEQUENCE_STEPS].inc(len(noted))
            self[metrics.GENERATION_TOKENS].inc(sum(output_tokens))
            self[metrics.ROWS].inc(sum(rows))
            if not any(drafted):
                continue
            self[metrics.DRAFTS].labels(method).inc(sum(map(bool, drafted)))
            self[metrics.DRAFT_TOKENS].labels(method).inc(sum(drafted))
            self[metrics.REUSED_TOKENS].labels(method).inc(sum(reused))
            self[metrics.ACCEPTED_TOKENS].labels(method).inc(sum(accepted))
            _, *reached = np.bincount(accepted)[::-1].cumsum()[::-1].tolist()
            for depth, count in enumerate(reached):
                self[metrics.ACCEPTED_AT].labels(method, str(depth)).inc(count)
