"""The attack with malformed requests, a small one on a real service.

The slow case starts Triton. It would catch a request that ends a part of the service, is never answered, or changes
what runs beside it.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.robustness import malformed as module
from benchmarks.robustness.http_requests import Raw
from benchmarks.robustness.malformed import HANG, PROTOCOLS, Neighbour, Tally, main, malformed, send_raw
from redraft.serving import launcher
from redraft.serving.rundir import RunDir, State
from redraft.serving.settings import ServeSettings
from tests.openai.serving import toy_bundle
from tests.serving.client_side import free_ports, start

TOY_WORKER = [sys.executable, "-m", "tests.serving.requests.toy_engine_worker"]


def test_a_request_follows_from_the_seed_and_its_number():
    made = [malformed(3, number) for number in range(600)]
    assert made == [malformed(3, number) for number in range(600)]
    assert made != [malformed(4, number) for number in range(600)]
    kinds = Counter((protocol, kind) for protocol, kind, _ in made)
    assert len(kinds) == 3 * 20 + 14
    assert Counter(protocol for protocol, _ in kinds.elements()) == dict.fromkeys(PROTOCOLS, 150)


@pytest.mark.parametrize(
    ("answer", "waits_for_end", "outcome"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False, "400"),
        (b"", True, "closed"),
        (b"", False, "closed"),
        (b"", None, HANG),
    ],
)
def test_how_a_request_ended(monkeypatch, answer, waits_for_end, outcome):
    """A server may answer, wait for the client's end, close at once, or do nothing."""
    monkeypatch.setattr(module, "HANG_S", 0.6 if outcome is HANG else 30)
    monkeypatch.setattr(module, "QUIET_S", 0.1)
    over = threading.Event()

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(answer)
            if waits_for_end:
                assert connection.recv(100) == b""
            elif waits_for_end is None:
                over.wait(10)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        assert send_raw(server.getsockname()[1], Raw(b"POST")) == outcome
        over.set()
        thread.join()
    assert send_raw(free_ports(1)[0], Raw(b"POST")) == "refused"


def test_a_stream_that_changes_or_fails_is_seen():
    over, texts = threading.Event(), iter(["a", "b", "a"])

    def run() -> str:
        try:
            return next(texts)
        except StopIteration:
            over.set()
            raise OSError("gone") from None

    stream = Neighbour("x", run, undisturbed="a")
    stream.run_until(over)
    assert (stream.runs, stream.changed) == (4, ["b", "OSError: gone"])


@pytest.mark.parametrize(("outcome", "status"), [("UNIMPLEMENTED", 0), ("INTERNAL", 1)])
def test_a_fault_fails_and_a_degraded_service_is_reported(tmp_path: Path, monkeypatch, outcome, status):
    tally = Tally()
    tally.add(4, "grpc", "kind", outcome)
    states = [
        State(phase=phase, settings=ServeSettings(bundle=tmp_path, openai_port=1)) for phase in ("ready", "degraded")
    ]
    monkeypatch.setattr(RunDir, "read_state", lambda _: states.pop(0))
    monkeypatch.setattr(module, "attack", lambda *_: tally)
    for stream in ("http_stream", "grpc_stream"):
        monkeypatch.setattr(module, stream, lambda *_: "text")
    output = tmp_path / "report.json"
    assert main(["--run-dir", str(tmp_path), "--requests", "1", "--output", str(output)]) == status
    assert json.loads(output.read_text())["faults"] == [4] * status


@pytest.mark.slow
def test_a_service_withstands_them(tmp_path: Path):
    bundle = toy_bundle(tmp_path / "bundle")
    (port,) = free_ports(1)
    start(tmp_path / "run", bundle, worker_command=TOY_WORKER, openai_port=port)
    try:
        options = ["--run-dir", str(tmp_path / "run"), "--requests", "120", "--output", str(tmp_path / "report.json")]
        status = main([*options, "--stream-tokens", "16"])
        report = json.loads((tmp_path / "report.json").read_text())
        assert status == 0, report
        for protocol, kinds in report["outcomes"].items():
            outcomes = sum((Counter(count) for count in kinds.values()), Counter())
            assert outcomes.total() == 30, (protocol, kinds)
        assert all(stream["runs"] > 0 for stream in report["streams"])
    finally:
        launcher.stop(tmp_path / "run")
