"""What the scheduler counts: the engine's metrics, and their sums by the names that tools in the same process read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from redraft import metrics
from redraft.decoding.text_store import TextStore
from redraft.metrics import Metric, Metrics
from redraft.request import SequenceStats

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
"""Times that are kept before they are counted, in one step."""

_Sums: TypeAlias = "Counter[tuple[Any, ...]]"
"""Counts by metric and labels."""


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

    What happens in every step is counted before somebody reads, since counting takes locks, and at small batches as
    long as all else that a step does on the host. What steps gained is in the statistics of the requests.
    """

    def __init__(self, texts: TextStore | None = None) -> None:
        """`texts`: those that drafts come from."""
        super().__init__(metrics.ENGINE)
        self._texts, self._guessed = texts, (0, 0)
        self._followed: dict[int, tuple[str, SequenceStats, _Sums]] = {}
        """The requests in slots, each with its method and what has been counted of it, by the statistics' identity."""
        self._gaps: list[float] = []
        self._steps: list[tuple[float, float, float]] = []
        self._expected: dict[str, float] = {}
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

    def follow(self, method: str, stats: SequenceStats) -> None:
        """Count what a request of a method gains, until it ends."""
        self._followed[id(stats)] = method, stats, Counter()

    def forget(self) -> None:
        """Follow no request any more."""
        self._count()
        self._followed.clear()

    def note_step(self, step_s: float, engine_s: float, draft_s: float, gaps_s: Iterable[float]) -> None:
        """Note a step: its wall time, the part inside of the engine, and the part of that inside of drafters; and of
        each sequence that gained tokens the time since it last did."""
        self._steps.append((step_s, engine_s, draft_s))
        self._gaps += gaps_s
        if len(self._steps) + len(self._gaps) > MOST_NOTED:
            self._count_times()

    def note_expected(self, nodes: Mapping[str, float]) -> None:
        """Note how many of a step's draft nodes should be accepted, by method."""
        for method, count in nodes.items():
            self._expected[method] = self._expected.get(method, 0.0) + count

    def count_end(self, reason: str, stats: SequenceStats) -> None:
        """Count a request that has ended, and the times that it took."""
        if id(stats) in self._followed:
            self._count_gains(id(stats))
            del self._followed[id(stats)]
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
        self._count_times()
        self._count_gains(*self._followed)
        self._count_texts()
        expected, self._expected = self._expected, {}
        for method, count in expected.items():
            self[metrics.EXPECTED_TOKENS].labels(method).inc(count)

    def _count_texts(self) -> None:
        if self._texts is None:
            return
        tokens, *guessed = self._texts.counts
        self[metrics.TEXT_TOKENS].set(tokens)
        entries = metrics.TEXT_GUESSES, metrics.TEXT_HITS
        for entry, now, before in zip(entries, guessed, self._guessed, strict=True):
            self[entry].inc(now - before)
        self._guessed = guessed[0], guessed[1]

    def _count_times(self) -> None:
        steps, self._steps = self._steps, []
        self[metrics.STEPS].inc(len(steps))
        times = metrics.STEP_TIME, metrics.ENGINE_TIME, metrics.DRAFT_TIME
        for entry, seconds in zip(times, zip(*steps, strict=True), strict=False):
            self[entry].inc(sum(seconds))
        gaps, self._gaps = self._gaps, []
        self[metrics.STEP_GAP].observe_all(gaps)

    def _count_gains(self, *keys: int) -> None:
        """Count what these requests have gained since they were counted last."""
        gained: _Sums = Counter()
        for key in keys:
            method, stats, counted = self._followed[key]
            sums = _sums(method, stats)
            self._followed[key] = method, stats, sums
            gained.update(sums)
            gained.subtract(counted)
        for (entry, *labels), count in gained.items():
            (self[entry].labels(*labels) if labels else self[entry]).inc(count)


def _sums(method: str, stats: SequenceStats) -> _Sums:
    """What a request has gained since its start."""
    sums: _Sums = Counter(
        {
            (metrics.SEQUENCE_STEPS,): stats.steps,
            (metrics.GENERATION_TOKENS,): stats.output_tokens,
            (metrics.ROWS,): stats.rows_executed,
        }
    )
    if stats.drafted:
        sums[metrics.DRAFTS, method] = stats.offered_by_depth[0]
        sums[metrics.DRAFT_TOKENS, method] = stats.drafted
        sums[metrics.ACCEPTED_TOKENS, method] = stats.accepted
        sums[metrics.REUSED_TOKENS, method] = stats.reused
        accepted = enumerate(stats.accepted_by_depth)
        sums.update({(metrics.ACCEPTED_AT, method, str(depth)): count for depth, count in accepted if count})
    return sums
