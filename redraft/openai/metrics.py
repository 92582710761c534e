"""The front end's own Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from redraft.request import SequenceStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PER_TOKEN = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)


class Metrics:
    """Requests by endpoint and status, sequences by how they ended, and what these took."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.up = Gauge("redraft_worker_up", "1 while the engine worker answers, else 0", registry=registry)
        self.running = Gauge("redraft_openai_sequences_running", "Sequences in flight", registry=registry)
        self._answers = Counter(
            "redraft_openai_answers", "Answers by endpoint and status", ["endpoint", "status"], registry=registry
        )
        self._ended = Counter(
            "redraft_openai_sequences", "Sequences by finish reason", ["finish_reason"], registry=registry
        )
        self._prompt_tokens = Counter("redraft_openai_prompt_tokens", "Prompt tokens", registry=registry)
        self._output_tokens = Counter("redraft_openai_output_tokens", "Generated tokens", registry=registry)
        self._queue = Histogram(
            "redraft_openai_queue_seconds", "Arrival at the worker to a slot", registry=registry, buckets=_SECONDS
        )
        self._first = Histogram(
            "redraft_openai_time_to_first_token_seconds",
            "Arrival at the worker to first token",
            registry=registry,
            buckets=_SECONDS,
        )
        self._each = Histogram(
            "redraft_openai_time_per_output_token_seconds",
            "Time after the first token, per further token",
            registry=registry,
            buckets=_PER_TOKEN,
        )
        self._whole = Histogram(
            "redraft_openai_request_seconds", "Arrival at the worker to last token", registry=registry, buckets=_SECONDS
        )

    def count_answer(self, endpoint: str, status: int) -> None:
        """An answer has begun, or was an error."""
        self._answers.labels(endpoint, str(status)).inc()

    def count_sequence(self, finish_reason: str, stats: SequenceStats | None) -> None:
        """A sequence has ended."""
        self._ended.labels(finish_reason).inc()
        if stats is None:
            return
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._output_tokens.inc(stats.output_tokens)
        first = stats.queue_ms + stats.prefill_ms
        self._queue.observe(stats.queue_ms / 1e3)
        if stats.output_tokens:
            self._first.observe(first / 1e3)
            self._whole.observe((first + stats.decode_ms) / 1e3)
        if stats.output_tokens > 1:
            self._each.observe(stats.decode_ms / 1e3 / (stats.output_tokens - 1))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
