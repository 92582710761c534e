"""What the scheduler counts: the engine's metrics, and their sums by the names that tools in the same process read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redraft import metrics
from redraft.metrics import Metric, Metrics
from redraft.request import SequenceStats
from redraft.sequence import Gain

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


class Totals:
    """Sums since the start, each read from its metric when it is asked for: `totals.accepted`, `totals.step_s`."""

    def __init__(self, values: Metrics):
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name not in _TOTALS:
            raise AttributeError(name)
        total = self._values.total(_TOTALS[name])
        return total if name.endswith("_s") else int(total)

    def __iter__(self) -> Any:
        """Names and values, for `dict`."""
        return ((name, getattr(self, name)) for name in _TOTALS)


def engine_metrics() -> Metrics:
    """The metrics of one engine. Each end that a request can have has a series from the start."""
    values = Metrics(metrics.ENGINE)
    for reason in metrics.FINISH_REASONS:
        values[metrics.ENDED].labels(reason)
    return values


def count_end(values: Metrics, reason: str, stats: SequenceStats) -> None:
    """Count a request that has ended, and the times that it took."""
    values[metrics.ENDED].labels(reason).inc()
    values[metrics.QUEUE_TIME].observe(stats.queue_ms / 1e3)
    if not stats.output_tokens:
        return
    first = stats.queue_ms + stats.prefill_ms
    values[metrics.FIRST_TOKEN_TIME].observe(first / 1e3)
    values[metrics.REQUEST_TIME].observe((first + stats.decode_ms) / 1e3)
    if stats.output_tokens > 1:
        values[metrics.PER_TOKEN_TIME].observe(stats.decode_ms / 1e3 / (stats.output_tokens - 1))


def count_gains(values: Metrics, gains: Mapping[str, Sequence[Gain]]) -> None:
    """Count what each method's sequences gained in a step: once a step, since a counter takes a lock."""
    every = [gain for group in gains.values() for gain in group]
    values[metrics.SEQUENCE_STEPS].inc(len(every))
    values[metrics.GENERATION_TOKENS].inc(sum(gain.output_tokens for gain in every))
    values[metrics.ROWS].inc(sum(gain.rows_executed for gain in every))
    for method, group in gains.items():
        if not (drafts := [gain for gain in group if gain.drafted]):
            continue
        values[metrics.DRAFTS].labels(method).inc(len(drafts))
        values[metrics.DRAFT_TOKENS].labels(method).inc(sum(gain.drafted for gain in drafts))
        accepted = [gain.accepted for gain in drafts]
        values[metrics.ACCEPTED_TOKENS].labels(method).inc(sum(accepted))
        values[metrics.REUSED_TOKENS].labels(method).inc(sum(gain.reused for gain in drafts))
        for depth in range(max(accepted)):
            deep = sum(count > depth for count in accepted)
            values[metrics.ACCEPTED_AT].labels(method, str(depth)).inc(deep)
