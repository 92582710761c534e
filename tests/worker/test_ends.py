"""Requests that a worker ends or refuses for others' sake: at their deadline, by client, and when it stops."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from redraft.request import GenerateRequest
from redraft.runtime import Runtime
from redraft.worker import server
from redraft.worker.client import WorkerClient, WorkerError
from redraft.worker.server import Worker
from tests.conftest import wait_until
from tests.worker.toy_worker import LIMITS, toy_runtime, wait_for_worker

TOY_WORKER = Path(__file__).with_name("toy_worker.py")
NEVER_ENDING = {"end_id": -1, "max_tokens": 240, "method": "auto_regressive"}


@pytest.fixture
def serving(tmp_path) -> Callable[..., WorkerClient]:
    """Starts a worker in a thread, 5 ms per step, and a client of it."""
    started: list[tuple[Worker, threading.Thread, WorkerClient]] = []

    def start(**options) -> WorkerClient:
        worker = Worker(toy_runtime(0.005), tmp_path / "w.sock", **options)
        thread = threading.Thread(target=worker.run)
        thread.start()
        client = WorkerClient(tmp_path / "w.sock")
        started.append((worker, thread, client))
        assert client.wait_connected(60)
        return client

    yield start
    for worker, thread, client in started:
        client.close()
        worker.stop()
        thread.join()


def request(sender, /, **fields):
    return GenerateRequest(**{"id": sender.new_id(), "text": "hello", **NEVER_ENDING, **fields})


def test_what_was_learned_is_written_soon_and_then_now_and_then(serving, monkeypatch):
    kept: list[float] = []
    monkeypatch.setattr(Runtime, "keep_learned", lambda _: kept.append(time.monotonic()))
    monkeypatch.setattr(server, "FIRST_KEEP_S", 0.0)
    serving()
    wait_until(lambda: kept)
    time.sleep(0.3)
    assert len(kept) == 1


def test_a_deadline_ends_running_and_waiting_requests(serving):
    client, ended = serving(), []
    for _ in range(LIMITS.slots + 1):
        client.submit(request(client, max_tokens=40, timeout_s=60), lambda _: None)
    client.submit(request(client, timeout_s=0.001), ended.append)
    wait_until(lambda: ended)
    assert (ended[0].finish_reason, ended[0].text, ended[0].stats.output_tokens) == ("timeout", "", 0)
    running = client.complete(request(client, timeout_s=0.5), timeout=60)
    assert running.finish_reason == "timeout"
    assert len(running.token_ids) == running.stats.output_tokens < 240
    wait_until(lambda: client.status().running == 0)
    assert 'request_success_total{finished_reason="timeout"} 2.0' in client.status(metrics=True).metrics


def test_requests_that_end_before_they_are_encoded(serving, monkeypatch):
    """At their deadline, or cancelled: the encoder takes none of them, and goes on with others."""
    encoded, free, sequence = [], threading.Event(), Runtime.sequence

    def encode(self, key, wanted, arrived, grammar):
        if len(wanted.text) > 100:
            encoded.append(wanted.text[0])
            free.wait(60)
        return sequence(self, key, wanted, arrived)

    monkeypatch.setattr("redraft.worker.server.INLINE_CHARACTERS", 100)
    monkeypatch.setattr(Runtime, "sequence", encode)
    client, ended = serving(), {}

    def submit(letter, **fields) -> str:
        wanted = request(client, text=letter * 200, max_tokens=1, **fields)
        client.submit(wanted, lambda message: ended.setdefault(letter, message))
        return wanted.id

    submit("a", timeout_s=1)
    wait_until(lambda: encoded)
    submit("b", timeout_s=0.05)
    wait_until(lambda: set(ended) == {"a", "b"})
    client.cancel(submit("c"))
    wait_until(lambda: "c" in ended)
    assert [ended[letter].finish_reason for letter in "abc"] == ["timeout", "timeout", "cancelled"]
    assert 'request_success_total{finished_reason="timeout"} 2.0' in client.status(metrics=True).metrics
    submit("e")
    free.set()
    wait_until(lambda: "e" in ended)
    assert encoded == ["a", "e"]


@pytest.mark.parametrize("text", ["hello", "x" * 140])
def test_a_client_at_its_limit_is_refused_and_others_are_not(serving, monkeypatch, text):
    monkeypatch.setattr("redraft.worker.server.INLINE_CHARACTERS", 100)
    client = serving(max_per_client=2)
    assert client.status().limits["max_per_client"] == 2
    results: list = []
    for _ in range(2):
        client.submit(request(client, text=text, max_tokens=100, client="a"), results.append)
    with pytest.raises(WorkerError, match=r"client 'a' has 2 requests already.*--max-per-client") as refused:
        client.complete(request(client, text=text, max_tokens=1, client="a"), timeout=60)
    assert refused.value.code == "rate_limit_exceeded"
    for other in ("b", None):
        assert client.complete(request(client, max_tokens=1, client=other), timeout=60).finish_reason == "length"
    wait_until(lambda: len([one for one in results if one.done]) == 2)
    assert client.complete(request(client, max_tokens=1, client="a"), timeout=60).finish_reason == "length"


def start_process(path: Path, drain_s: float) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, str(TOY_WORKER), str(path), "0.03", str(drain_s)])
    wait_for_worker(path, 60)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_worker_ends_with_its_last_request(tmp_path, number):
    """Running and waiting ones get their whole answers, and new ones are refused."""
    process = start_process(tmp_path / "w.sock", 60)
    with WorkerClient(tmp_path / "w.sock") as client:
        assert client.wait_connected(60)
        results: list = []
        running = client.generate(request(client, stream=True), timeout=60)
        next(running)
        for _ in range(2):
            client.submit(request(client, max_tokens=80), results.append)
        wait_until(lambda: client.status().waiting == 1)
        process.send_signal(number)
        wait_until(lambda: not client.status().ready)
        with pytest.raises(WorkerError, match="shutting down") as refused:
            client.complete(request(client), timeout=60)
        assert refused.value.code == "service_unavailable"
        assert list(running)[-1].finish_reason == "length"
        assert process.wait(60) == 0
    assert [one.finish_reason for one in results] == ["length", "length"]
    assert not (tmp_path / "w.sock").exists()


@pytest.mark.parametrize(("drain_s", "signals"), [(0.1, 1), (60, 2)])
def test_a_drain_is_bounded_and_a_second_signal_cuts_it_short(tmp_path, drain_s, signals):
    process = start_process(tmp_path / "w.sock", drain_s)
    with WorkerClient(tmp_path / "w.sock") as client:
        assert client.wait_connected(60)
        chunks = client.generate(request(client, stream=True), timeout=60)
        next(chunks)
        process.send_signal(signal.SIGTERM)
        if signals == 2:
            wait_until(lambda: not client.status().ready)
            process.send_signal(signal.SIGTERM)
        with pytest.raises(WorkerError, match=r"shutting down|went away"):
            list(chunks)
    assert process.wait(60) == 0
