"""The page of metrics of `/v1`: the front end's own beside those that both ports have."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from redraft import metrics
from redraft.serving.metrics_page import metrics_page

CONTENT_TYPE = CONTENT_TYPE_LATEST


class FrontEndMetrics:
    """The answers of this front end, and the page that has them."""

    def __init__(self, socket: Path):
        """`socket` is the worker's."""
        self._socket = socket
        self._values = metrics.Metrics(metrics.OPENAI)
        self.running = self._values[metrics.SEQUENCES]
        ProcessCollector(registry=self._values.registry)

    def count_answer(self, endpoint: str, status: int) -> None:
        """Count an answer that has begun, or was an error."""
        self._values[metrics.ANSWERS].labels(endpoint, str(status)).inc()

    def page(self, engine: str | None) -> bytes:
        """All metrics in Prometheus' text format; `engine` are the worker's, None where it is away."""
        return self._values.page() + metrics_page(self._socket, engine)
