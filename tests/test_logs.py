"""Logs as JSON: one object a line, whatever is logged, and from every process that the option reaches."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from opentelemetry.trace import NoOpTracerProvider

from redraft import logs
from redraft.openai.access import Access, Gate
from redraft.openai.app import create_app
from redraft.openai.metrics import FrontEndMetrics
from redraft.openai.tracing import Tracing
from redraft.worker.server import main

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def json_logs(monkeypatch):
    """The environment of a service with JSON logs; this process's logging as it was, afterwards."""
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "json")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def test_a_record_is_one_line_also_with_a_traceback(json_logs, capsys):
    logs.configure("ignored %(message)s")
    logging.getLogger("redraft.some").warning("two\nlines and %s", "\udc80", extra={"fields": {"status": 200}})
    try:
        raise ValueError("no prompt")
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    first, last = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["status"]) == ("warning", "redraft.some", 200)
    assert first["message"] == "two\nlines and \udc80"
    assert first["time"].endswith("+00:00")
    assert (last["level"], last["message"]) == ("critical", "ValueError ended the process")
    assert "test_logs.py" in last["exception"]


def test_the_worker_logs_why_it_cannot_start(json_logs, capsys, tmp_path):
    assert main(["--bundle", str(tmp_path / "none"), "--socket", str(tmp_path / "s")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "none") in json.loads(line)["message"]


def test_a_request_is_a_line_with_fields(json_logs):
    """Its ids are those that the client sent, as an operator looks for them."""
    handler = logging.StreamHandler(written := io.StringIO())
    logs.configure(handlers=[handler])
    tracing = Tracing(NoOpTracerProvider(), "m")
    gate = Gate(create_app(SimpleNamespace(tracing=tracing)), Access(), FrontEndMetrics(Path("none")))

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://localhost") as client:
            await client.get("/page.js?secret", headers={"X-Request-Id": "mine-1", "traceparent": TRACE})

    asyncio.run(ask())
    (line,) = [one for one in map(json.loads, written.getvalue().splitlines()) if one["logger"] == "redraft.openai"]
    assert line.items() >= {
        "method": "GET", "path": "/page.js", "status": 200, "x_request_id": "mine-1", "traceparent": TRACE,
        "level": "info",
    }.items()  # fmt: skip
    assert line["seconds"] >= 0
    assert "secret" not in str(line), "a query may hold anything"
