"""What the robustness scripts make of what they see; small attacks on a real service are slow.

The slow cases start Triton. They would catch a malformed request that ends a part of the service, is never answered or
changes what runs beside it, and cancelled requests that count as errors.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections import Counter

import pytest

from benchmarks.command import execute
from benchmarks.robustness import malformed, soak
from benchmarks.robustness.faults import Fault, _lies
from benchmarks.robustness.http_requests import Raw
from redraft.serving import launcher
from tests.openai.serving import toy_bundle
from tests.serving.client_side import free_ports, start

TOY_WORKER = [sys.executable, "-m", "tests.serving.requests.toy_engine_worker"]
MB = 10**6


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"back_s": None}, ["back after 120.0 s"]),
        ({"lies": 2}, ["health was wrong 2 times"]),
        ({"streams": Counter(whole=3, failed=2)}, []),
        ({"streams": Counter(changed=1, hang=2)}, ["1 streams: changed", "2 streams: hang"]),
        ({"streams": Counter(whole=3, failed=2), "unwatched": True}, ["2 streams: failed"]),
    ],
)
def test_what_is_wrong_after_a_fault(changes, wrong):
    fault = Fault(**({"process": "guard", "signal": "SIGKILL", "limit_s": 5.0, "back_s": 1.0} | changes))
    assert fault.wrong == wrong


def test_health_may_be_late_but_not_wrong():
    """Requests fail from 1.0 to 9.0. Who says ready after 4.0 is wrong, or later where the fault began later."""
    truth = [(0.0, 0.5, True), *((moment, moment + 1.0, False) for moment in range(1, 9)), (9.0, 9.5, True)]
    ready = [(moment + 0.5, moment + 0.6, True) for moment in range(10)]
    assert _lies(ready, truth, begun=0.0) == 5
    assert _lies(ready, truth, begun=4.0) == 2


def test_a_malformed_request_follows_from_the_seed_and_its_number():
    made = [malformed.malformed(3, number) for number in range(600)]
    assert made == [malformed.malformed(3, number) for number in range(600)]
    assert len({(protocol, kind) for protocol, kind, _ in made}) == 3 * 20 + 14


@pytest.mark.parametrize(
    ("answer", "closes", "outcome"),
    [(b"HTTP/1.1 400 Bad\r\n\r\n", True, "400"), (b"", True, "closed"), (b"", False, malformed.HANG)],
)
def test_how_a_request_ended(monkeypatch, answer, closes, outcome):
    monkeypatch.setattr(malformed, "HANG_S", 30 if closes else 0.6)
    monkeypatch.setattr(malformed, "QUIET_S", 0.1)
    over = threading.Event()

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(answer)
            if not closes:
                over.wait(10)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        assert malformed.send_raw(server.getsockname()[1], Raw(b"POST")) == outcome
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("sizes", "slope", "flat"),
    [
        ([(300 + index) * MB for index in range(101)], 100.0, False),
        ([(100 + 20 * (index > 10)) * MB for index in range(101)], 0.0, True),
    ],
    ids=["leaks", "settles"],
)
def test_growth_is_a_line_through_what_has_settled(sizes, slope, flat):
    result = soak.growth([index * 36.0 for index in range(101)], sizes)
    assert (result.mb_per_hour, result.flat) == (pytest.approx(slope, abs=0.01), flat)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        (malformed, "--requests 120 --stream-tokens 16"),
        (soak, "--seconds 5 --share 0.3 --cancel 0.5 --num-prompts 6 --max-tokens 9"),
    ],
    ids=["malformed", "soak"],
)
def test_a_service_withstands_it(script, options, tmp_path):
    bundle = toy_bundle(tmp_path / "bundle")
    (port,) = free_ports(1)
    start(tmp_path / "run", bundle, worker_command=TOY_WORKER, openai_port=port, max_queue=64)
    try:
        output = tmp_path / "report.json"
        run_dir = ["--run-dir", tmp_path / "run", "--output", output]
        assert execute(script.main, [*run_dir, *options.split()]) == 0, output.read_text()
        report = json.loads(output.read_text())
        assert report["streams"] if script is malformed else min(report["whole"], report["cancelled"]) > 0
    finally:
        launcher.stop(tmp_path / "run")
