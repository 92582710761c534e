"""Guided requests through a worker: compiled beside the steps, refused without harm."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from redraft.request import GenerateRequest, Guide
from redraft.worker.client import WorkerClient, WorkerError
from redraft.worker.server import Worker
from tests.worker.toy_worker import toy_runtime

CHOICE = Guide(kind="choice", text='["yes", "no"]')
HOSTILE = {
    "a long chain of rules": Guide(
        kind="grammar", text="\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(9000)), 'r9000 ::= "a"'])
    ),
    "deep nesting": Guide(kind="json_schema", text='{"items":' * 20_000 + "{}" + "}" * 20_000),
}


@pytest.fixture
def service(tmp_path: Path):
    """A worker in a thread, 5 ms per step, a client, and the runtime."""
    runtime = toy_runtime(0.005)
    served = Worker(runtime, tmp_path / "w.sock")
    thread = threading.Thread(target=served.run)
    thread.start()
    with WorkerClient(tmp_path / "w.sock") as client:
        assert client.wait_connected(60)
        yield client, runtime
    served.stop()
    thread.join()


def request(client: WorkerClient, guide: Guide | None, **fields) -> GenerateRequest:
    return GenerateRequest(
        **{"id": client.new_id(), "text": "hello", "max_tokens": 20, "guide": guide, **fields},
    )


def test_an_answer_is_what_its_guide_asks_for(service):
    client, runtime = service
    for _ in range(2):
        whole = client.complete(request(client, CHOICE), timeout=60)
        assert (whole.text in CHOICE.choices, whole.finish_reason) == (True, "stop")
    assert runtime.grammars.kept(CHOICE) is not None
    chunks = list(client.generate(request(client, CHOICE, stream=True), timeout=60))
    assert "".join(chunk.text for chunk in chunks) == whole.text


@pytest.mark.parametrize("name", HOSTILE)
def test_a_guide_that_is_refused_stops_no_stream(service, name):
    client, _ = service
    client.complete(request(client, CHOICE), timeout=60)
    gaps, running = [0.0], threading.Event()

    def stream() -> None:
        last = time.perf_counter()
        for _ in client.generate(request(client, None, stream=True, end_id=-1, max_tokens=200), timeout=60):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
            running.set()

    neighbour = threading.Thread(target=stream)
    neighbour.start()
    assert running.wait(60)
    started = time.perf_counter()
    with pytest.raises(WorkerError, match=r"^guide.text: the \w+ cannot be used: ") as refusal:
        client.complete(request(client, HOSTILE[name]), timeout=60)
    assert time.perf_counter() - started < 2
    assert refusal.value.code == "invalid"
    neighbour.join()
    assert max(gaps) < 0.5
    assert client.complete(request(client, CHOICE), timeout=60).text in CHOICE.choices
