"""Prometheus metrics: the worker's, named as vLLM names them, and the front end's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from redraft.scheduling.service_stats import Histogram
from redraft.worker.protocol import WorkerStatus

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX_CACHE = {
    "prefix_cache_queries": "Prompt tokens of requests that may reuse cached ones",
    "prefix_cache_hits": "Prompt tokens that were cached",
}


class Metrics(Collector):
    """The answers of this front end, and all that the worker has served, whoever asked for it."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._status: WorkerStatus | None = None
        ProcessCollector(registry=registry)
        self._up = Gauge("redraft_worker_up", "1 while the engine worker answers, else 0", registry=registry)
        self.running = Gauge("redraft_openai_sequences_running", "Sequences in flight", registry=registry)
        self._answers = Counter(
            "redraft_openai_answers", "Answers by endpoint and status", ["endpoint", "status"], registry=registry
        )
        registry.register(self)

    def count_answer(self, endpoint: str, status: int) -> None:
        """An answer has begun, or was an error."""
        self._answers.labels(endpoint, str(status)).inc()

    def text(self, status: WorkerStatus | None) -> bytes:
        """All metrics in Prometheus' text format; `status` None: the worker is away, and its metrics are missing."""
        self._up.set(status is not None)
        self._status = status
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The worker's metrics."""
        status = self._status
        if status is None:
            return
        totals, service = status.totals, status.service
        yield _gauge("num_requests_running", "Sequences that take part in the current step", status.running)
        yield _gauge("num_requests_waiting", "Requests in the queue", status.waiting)
        yield _gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", status.kv_use)
        yield _counter("prompt_tokens", "Prompt tokens of admitted requests", totals.get("prompt_tokens", 0))
        for name, text in PREFIX_CACHE.items():
            yield _counter(name, text, totals.get(name, 0))
        yield _counter("generation_tokens", "Generated tokens", totals.get("output_tokens", 0))
        ended = _labelled("request_success", "Requests by finish reason", ["finished_reason"])
        for reason, count in service.finished.items():
            ended.add_metric([reason], count)
        yield ended
        yield _histogram("request_queue_time_seconds", "Arrival at the worker to a slot", service.queue)
        yield _histogram("time_to_first_token_seconds", "Arrival at the worker to first token", service.first_token)
        yield _histogram(
            "inter_token_latency_seconds", "From one output of tokens to the next, of each sequence", service.step_gap
        )
        yield _histogram(
            "request_time_per_output_token_seconds", "Time after the first token, per further token", service.per_token
        )
        yield _histogram("e2e_request_latency_seconds", "Arrival at the worker to last token", service.whole)
        yield from self._drafting(status)

    def _drafting(self, status: WorkerStatus) -> Iterator[Metric]:
        methods = status.service.methods
        counts = {
            "num_drafts": ("Steps of sequences with a draft", "drafts"),
            "num_draft_tokens": ("Draft tokens that were verified", "drafted"),
            "num_accepted_tokens": ("Draft tokens that were accepted", "accepted"),
            "num_reused_tokens": ("Accepted tokens that only a re-sampled draft held", "reused"),
        }
        for name, (text, field) in counts.items():
            family = _labelled(f"spec_decode_{name}", text, ["method"])
            for method, stats in methods.items():
                family.add_metric([method], getattr(stats, field))
            yield family
        family = _labelled(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that had the token at this depth accepted; 0: the first",
            ["method", "position"],
        )
        for method, stats in methods.items():
            for position, count in enumerate(stats.accepted_per_pos):
                family.add_metric([method, str(position)], count)
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"redraft_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"redraft_{name}", text, value)


def _labelled(name: str, text: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(f"redraft_{name}", text, labels=labels)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(f"redraft_{name}", text, buckets, histogram.sum)
