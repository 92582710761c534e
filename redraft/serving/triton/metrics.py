"""Metrics in Triton's own Prometheus endpoint. Imported inside Triton's Python backend only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from redraft.request import SequenceStats
from redraft.worker.protocol import WorkerStatus

_GAUGES = {
    "redraft_worker_up": "1 while the engine worker answers, else 0",
    "redraft_requests_running": "Sequences that take part in the current step",
    "redraft_requests_waiting": "Requests in the queue",
    "redraft_kv_use_ratio": "Share of the KV cache in use, 0 to 1",
    "redraft_acceptance_length": "Tokens gained per step, bonus token included, since the worker started",
}
_COUNTERS = {
    "requests": "Requests that the worker accepted",
    "timeouts": "Requests that ended at their deadline",
    "steps": "Target forwards",
    "sequence_steps": "Steps of sequences: target forwards times the sequences that decoded in them",
    "prompt_tokens": "Prompt tokens of admitted requests",
    "prefix_cache_queries": "Prompt tokens of requests that may reuse cached ones",
    "prefix_cache_hits": "Prompt tokens that were cached",
    "output_tokens": "Generated tokens",
    "drafted": "Draft tokens that were verified",
    "accepted": "Draft tokens that were accepted",
    "rows_executed": "Rows that the target network executed, prefill included",
}
_TTFT_BUCKETS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]
_TPOT_BUCKETS = [0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0]


class WorkerMetrics:
    """State and totals of the worker; counters go on counting when a worker restarts from zero."""

    def __init__(self) -> None:
        kind = pb_utils.MetricFamily
        self._families = {n: kind(name=n, description=text, kind=kind.GAUGE) for n, text in _GAUGES.items()}
        self._families |= {
            f"redraft_{key}": kind(name=f"redraft_{key}", description=text, kind=kind.COUNTER)
            for key, text in _COUNTERS.items()
        }
        self._metrics = {name: family.Metric(labels={}) for name, family in self._families.items()}
        self._gauges: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def update(self, status: WorkerStatus | None) -> None:
        """Publish a worker's status; None means that it is not there. What has not changed is not sent to Triton."""
        if status is None:
            self._set(worker_up=0.0, requests_running=0.0, requests_waiting=0.0, kv_use_ratio=0.0)
            return
        self._set(
            worker_up=float(status.ready),
            requests_running=float(status.running),
            requests_waiting=float(status.waiting),
            kv_use_ratio=status.kv_use,
        )
        totals = {key: float(status.totals.get(key, 0)) for key in _COUNTERS}
        if totals["sequence_steps"]:
            self._set(acceptance_length=1 + totals["accepted"] / totals["sequence_steps"])
        for key, value in totals.items():
            last = self._totals.get(key, 0.0)
            if value != last:
                self._metrics[f"redraft_{key}"].increment(value - last if value > last else value)
        self._totals = totals

    def _set(self, **gauges: float) -> None:
        for key, value in gauges.items():
            if self._gauges.get(key) != value:
                self._metrics[f"redraft_{key}"].set(value)
        self._gauges |= gauges


class RestartMetrics:
    """What the supervisor counts, from its state file; where it has none (a server of one's own) all stays 0."""

    def __init__(self, state_file: Path) -> None:
        self._file = state_file
        kind = pb_utils.MetricFamily
        self._restarts = kind(
            name="redraft_worker_restarts", description="Starts of the engine worker after its first", kind=kind.GAUGE
        )
        self._failures = kind(
            name="redraft_rank_failures",
            description="Deaths and hangs of a rank that took the worker down; rank -1: on another machine",
            kind=kind.GAUGE,
        )
        self._metrics: dict[str, Any] = {"": self._restarts.Metric(labels={})}
        self._told: dict[str, int] = {}

    def update(self) -> None:
        """Publish what the file says now. What has not changed is not sent: a server that ends may never take it."""
        try:
            state = json.loads(self._file.read_bytes())
            restarts = int(state["worker_restarts"])
            failures = {rank: int(count) for rank, count in state["rank_failures"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        for rank, count in ({"": restarts} | failures).items():
            if rank not in self._metrics:
                self._metrics[rank] = self._failures.Metric(labels={"rank": rank})
            if self._told.get(rank) != count:
                self._metrics[rank].set(count)
                self._told[rank] = count


class LatencyMetrics:
    """Histograms of one model's finished requests."""

    def __init__(self, model: str) -> None:
        self._families = [
            pb_utils.MetricFamily(name=name, description=text, kind=pb_utils.MetricFamily.HISTOGRAM)
            for name, text in (
                ("redraft_time_to_first_token_seconds", "Arrival at the worker to first token"),
                ("redraft_time_per_output_token_seconds", "(end to end - TTFT) / (tokens - 1), per request"),
            )
        ]
        ttft, tpot = self._families
        self._ttft = ttft.Metric(labels={"model": model}, buckets=_TTFT_BUCKETS)
        self._tpot = tpot.Metric(labels={"model": model}, buckets=_TPOT_BUCKETS)

    def observe(self, stats: SequenceStats) -> None:
        """Count one finished request."""
        self._ttft.observe((stats.queue_ms + stats.prefill_ms) / 1000)
        if stats.output_tokens > 1:
            self._tpot.observe(stats.decode_ms / 1000 / (stats.output_tokens - 1))
