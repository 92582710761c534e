"""Spans of `/v1`: one per request, in the trace that its client began, and below it those of its sequences."""

from __future__ import annotations

import asyncio
import builtins
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from redraft.openai.access import Access, Gate
from redraft.openai.app import create_app
from redraft.openai.metrics import FrontEndMetrics
from redraft.openai.model import ServedModel
from redraft.openai.service import Service
from redraft.openai.tracing import ENDPOINT_VARIABLES, Tracing, TracingError, exporting
from redraft.request import SequenceStats
from redraft.worker.protocol import Chunk

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STATS = SequenceStats(
    prompt_tokens=3, output_tokens=7, steps=2, drafted=9, accepted=4, queue_ms=5.0, prefill_ms=20.0, decode_ms=75.0
)


def answer(wanted, on_message) -> None:
    on_message(Chunk(id=wanted.id, text="a secret", token_ids=[1], done=True, finish_reason="stop", stats=STATS))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_traced_with_its_sequences(bundle, stream):
    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    client, metrics = SimpleNamespace(new_id=lambda: "r1", submit=answer), FrontEndMetrics(Path("none"))
    model = ServedModel(bundle)
    app = Gate(create_app(Service(model, client, metrics, 1.0, Tracing(provider, model.name))), Access(), metrics)

    async def ask() -> None:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as asking:
            body = {"prompt": "a secret", "stream": stream}
            assert (await asking.post("/v1/completions", json=body, headers=headers)).status_code == 200
            await asking.get("/page.js")

    asyncio.run(ask())
    spans = {span.name: span for span in kept.get_finished_spans()}
    assert list(spans) == ["queue", "prefill", "decode", "generate", "POST /v1/completions"]
    request, whole = spans["POST /v1/completions"], spans["generate"]
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    assert f"{request.parent.span_id:016x}" == PARENT
    assert whole.parent.span_id == request.context.span_id
    assert all(spans[name].parent.span_id == whole.context.span_id for name in ("queue", "prefill", "decode"))
    assert spans["queue"].start_time == whole.start_time
    assert spans["decode"].end_time == whole.end_time == whole.start_time + 100_000_000
    assert whole.attributes["gen_ai.usage.output_tokens"] == 7
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert "secret" not in "".join(span.to_json() for span in spans.values())


def test_traces_need_an_address_and_their_packages(monkeypatch):
    for name in ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not Tracing(exporting(), "m").on
    monkeypatch.setenv(ENDPOINT_VARIABLES[1], "http://127.0.0.1:9")
    load = builtins.__import__

    def without(name, *rest):
        if name.startswith("opentelemetry.exporter"):
            raise ImportError("no exporter")
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TracingError, match=r"no exporter: \S*pip install 'redraft\[telemetry\]'"):
        exporting()
