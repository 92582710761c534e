"""A worker whose place another one takes: every request ends, on the one or on the other.

It would catch a request that is lost between the two, is run twice, or is cancelled at the wrong one, and a worker that
never ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from redraft.request import GenerateRequest
from redraft.serving.rundir import point
from redraft.worker.client import WorkerClient, WorkerError
from redraft.worker.protocol import pack
from redraft.worker.server import Worker
from tests.conftest import wait_until
from tests.worker.toy_worker import toy_runtime


class Workers:
    """Workers of a service, one after the other, behind a link. `swap` starts the next one."""

    def __init__(self, folder: Path):
        self.folder, self.link = folder, folder / "w.sock"
        self.workers: list[Worker] = []
        self.threads: list[threading.Thread] = []
        self.start()

    def start(self) -> None:
        socket = self.folder / f"w-{len(self.workers)}.sock"
        self.workers.append(Worker(toy_runtime(0.005), socket))
        self.threads.append(threading.Thread(target=self.workers[-1].run))
        self.threads[-1].start()
        point(self.link, socket)

    def swap(self, control: WorkerClient, seconds: float = 60.0) -> None:
        self.start()
        control.replaced(seconds)

    def served(self) -> list[int]:
        """Requests that each worker accepted."""
        return [int(worker._runtime.scheduler.totals.requests) for worker in self.workers]

    def stop(self) -> None:
        for worker, thread in zip(self.workers, self.threads, strict=True):
            worker.stop()
            thread.join()


@pytest.fixture
def workers(tmp_path) -> Iterator[Workers]:
    running = Workers(tmp_path)
    yield running
    running.stop()


@pytest.fixture
def connect(workers) -> Iterator[Callable[[], WorkerClient]]:
    clients: list[WorkerClient] = []

    def make() -> WorkerClient:
        client = WorkerClient(workers.link)
        clients.append(client)
        assert client.wait_connected(60)
        return client

    yield make
    for client in clients:
        client.close()


def request(client: WorkerClient, max_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(
        id=client.new_id(), text="hello", max_tokens=max_tokens, end_id=-1, stream=True, method="auto_regressive"
    )


def test_running_requests_end_where_they_are_and_new_ones_go_on(workers, connect):
    client, control = connect(), connect()
    running = client.generate(request(client, 100), timeout=60)
    next(running)
    workers.swap(control)
    control.status()  # the old one has heard of it, since it gives this back
    for _ in range(3):
        assert client.complete(request(client), timeout=60).finish_reason == "length"
    rest = list(running)
    assert rest[-1].finish_reason == "length"
    assert rest[-1].stats.output_tokens == 100
    assert workers.served() == [1, 3]
    workers.threads[0].join(10)
    assert not workers.threads[0].is_alive(), "it ends when its clients have left"
    assert not (workers.folder / "w-0.sock").exists()
    assert (workers.folder / "w-1.sock").exists()


def test_no_request_is_lost_however_it_falls(workers, connect):
    """Two clients send one request after the other while three swaps take place."""
    over, failures, sent = threading.Event(), [], []

    def work() -> None:
        client = connect()
        while not over.is_set():
            try:
                sent.append(client.complete(request(client, 2), timeout=60))
            except WorkerError as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    control = connect()
    for _ in range(3):
        before = len(sent)
        wait_until(lambda before=before: len(sent) > before + 10)
        workers.swap(control)
        wait_until(lambda: control.status().ready)
    before = len(sent)
    wait_until(lambda: len(sent) > before + 10)
    over.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(workers.served()) == len(sent), "each request ran once"
    assert {len(chunk.token_ids) for chunk in sent} == {2}
    for thread in workers.threads[:-1]:
        thread.join(10)
        assert not thread.is_alive()


def test_a_request_that_came_too_late_can_still_be_cancelled(workers, connect, monkeypatch):
    """The old worker gives both messages back, after both have been sent."""
    client, ended, sent = connect(), [], threading.Event()
    client.status()
    old = workers.workers[0]
    handle = old._handle
    monkeypatch.setattr(old, "_handle", lambda *message: sent.wait(60) and handle(*message))
    workers.start()
    old._replaced_at = 0.0  # as if the client had not yet heard of it
    late = request(client, 200)
    client.submit(late, lambda message: ended.append(message) if message.done else None)
    client.cancel(late.id)
    wait_until(lambda: late.id in client._cancelled)
    sent.set()
    wait_until(lambda: ended)
    assert ended[0].finish_reason == "cancelled"
    assert workers.served()[0] == 0


def test_a_running_request_is_cancelled_at_the_old_worker(workers, connect):
    client, control = connect(), connect()
    running = client.generate(request(client, 200), timeout=60)
    next(running)
    workers.swap(control)
    client.complete(request(client), timeout=60)
    running.close()
    workers.threads[0].join(10)
    assert not workers.threads[0].is_alive()


def test_a_client_that_does_not_leave_is_waited_for_until_the_end(workers, connect, tmp_path):
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(f"ipc://{tmp_path / 'w-0.sock'}")
    stranger.send(pack({"op": "status"}))
    stranger.recv()
    control = connect()
    begun = time.monotonic()
    workers.swap(control, seconds=0.5)
    workers.threads[0].join(20)
    assert not workers.threads[0].is_alive()
    assert time.monotonic() - begun > 0.5
    stranger.close(linger=0)


def test_a_new_worker_that_dies_at_once_fails_what_waits_for_it(workers, connect):
    """It does not hang, nor is it sent to whoever listens there later."""
    client, control = connect(), connect()
    running = client.generate(request(client, 100), timeout=60)
    next(running)
    point(workers.link, workers.folder / "nobody.sock")
    control.replaced(60)

    def refused() -> bool:
        try:
            client.complete(request(client), timeout=60)
        except WorkerError as error:
            return error.code == "service_unavailable"
        return False

    wait_until(refused)
    assert list(running)[-1].finish_reason == "length"
