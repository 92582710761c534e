"""OpenTelemetry spans: FastAPI's own for each request, and below it those of the sequences that the worker served.

They continue the trace that a request's `traceparent` names, and hold nothing of prompts and answers.
"""

from __future__ import annotations

import os
import time

from opentelemetry.trace import NoOpTracerProvider, TracerProvider
from opentelemetry.util.types import AttributeValue

from redraft.errors import install
from redraft.request import SequenceStats

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Standard environment variables with the address of a collector, over HTTP. Without them nothing is traced."""


class TracingError(RuntimeError):
    """Traces are asked for and cannot be sent."""


def exporting() -> TracerProvider:
    """Sends spans to the collector that the environment names, if any. OpenTelemetry's other variables count too, such
    as OTEL_SERVICE_NAME. Raises TracingError where its packages are missing."""
    if not any(map(os.environ.get, ENDPOINT_VARIABLES)):
        return NoOpTracerProvider()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk import trace
        from opentelemetry.sdk.resources import OTEL_SERVICE_NAME, Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingError(f"{error}: {install('telemetry')}, or unset {ENDPOINT_VARIABLES[1]}") from None
    named = {} if OTEL_SERVICE_NAME in os.environ else {"service.name": "redraft"}
    provider = trace.TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Tracing:
    """Spans of sequences of a model, below the current span."""

    def __init__(self, provider: TracerProvider, model: str):
        self.provider = provider
        self._tracer = provider.get_tracer("redraft")
        self.model = model

    @property
    def on(self) -> bool:
        """Whether there is anyone to trace for."""
        return not isinstance(self.provider, NoOpTracerProvider)

    def sequence(self, finish_reason: str, stats: SequenceStats) -> None:
        """A sequence has ended: a span of its whole life, with one each of waiting, prefill and decoding."""
        if not self.on:
            return
        now = time.time_ns()
        phases = {"queue": stats.queue_ms, "prefill": stats.prefill_ms, "decode": stats.decode_ms}
        start = now - int(1e6 * sum(phases.values()))
        attributes: dict[str, AttributeValue] = {
            "gen_ai.request.model": self.model,
            "gen_ai.usage.input_tokens": stats.prompt_tokens,
            "gen_ai.usage.output_tokens": stats.output_tokens,
            "gen_ai.response.finish_reasons": [finish_reason],
            "redraft.steps": stats.steps,
            "redraft.draft_tokens": stats.drafted,
            "redraft.accepted_tokens": stats.accepted,
        }
        with self._tracer.start_as_current_span(
            "generate", start_time=start, attributes=attributes, end_on_exit=False
        ) as whole:
            for name, milliseconds in phases.items():
                span = self._tracer.start_span(name, start_time=start)
                start += int(1e6 * milliseconds)
                span.end(start)
        whole.end(now)
