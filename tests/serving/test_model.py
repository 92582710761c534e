"""The base of the Triton models and their metrics, without Triton."""

from __future__ import annotations

import importlib
import queue
import sys
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest

from redraft.protocol import GenerateRequest, WorkerStatus


class Sender:
    def __init__(self):
        self.asked = 0

    def is_cancelled(self) -> bool:
        self.asked += 1
        return False


class Family:
    """Triton's metric families, which remember every call."""

    GAUGE, COUNTER, HISTOGRAM = range(3)
    calls: ClassVar[list[tuple[str, float]]] = []

    def __init__(self, name: str, **_: object):
        self.name = name

    def Metric(self, **_: object) -> SimpleNamespace:
        def record(value: float) -> None:
            self.calls.append((self.name, value))

        return SimpleNamespace(set=record, increment=record, observe=record)


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace(MetricFamily=Family))
    return importlib.import_module("redraft.serving.model")


def test_many_requests_in_flight_are_asked_about_in_turn(module):
    """A question takes Triton 30 us: asking about thousands at once would hold up every response."""
    model = module.GenerationModel()
    senders = [Sender() for _ in range(100)]
    request = GenerateRequest(id="r", text="x", max_tokens=1)
    model._in_flight = {str(place): module.Exchange(request, sender) for place, sender in enumerate(senders)}
    model._poll_from = 0
    model._pass_on_cancellations()
    assert sum(sender.asked for sender in senders) == module.CANCELLATIONS_PER_POLL < 100
    for _ in range(99 // module.CANCELLATIONS_PER_POLL):
        model._pass_on_cancellations()
    assert {sender.asked for sender in senders} == {1}


class CountedQueue(queue.SimpleQueue):
    waits = 0

    def get(self, *args, **options):
        self.waits += 1
        return super().get(*args, **options)


def test_the_response_thread_sleeps_while_nothing_is_in_flight(module):
    """It asks about cancellations every 20 ms, but only as long as there is a request to ask about."""
    model = module.GenerationModel()
    model._messages, model._in_flight, model._poll_from = CountedQueue(), {}, 0
    model._closing = threading.Event()
    thread = threading.Thread(target=model._respond)
    thread.start()
    assert not model._closing.wait(5 * module.CANCELLATION_POLL_S)
    assert model._messages.waits == 1
    sender = Sender()
    model._in_flight["r"] = module.Exchange(GenerateRequest(id="r", text="x", max_tokens=1), sender)
    model._wake()
    assert not model._closing.wait(10 * module.CANCELLATION_POLL_S)
    assert sender.asked > 2
    model._in_flight.clear()
    model._closing.set()
    model._wake()
    thread.join(1)
    assert not thread.is_alive()


def test_only_metrics_that_changed_are_sent(module):
    Family.calls = []
    metrics = module.WorkerMetrics()
    status = WorkerStatus(running=1, totals={"steps": 5, "sequence_steps": 4, "accepted": 2})
    metrics.update(status)
    assert ("redraft_steps", 5.0) in Family.calls
    assert ("redraft_acceptance_length", 1.5) in Family.calls
    Family.calls = []
    metrics.update(status)
    assert Family.calls == []
    metrics.update(None)
    metrics.update(WorkerStatus(totals={"steps": 3}))
    assert Family.calls == [
        ("redraft_worker_up", 0.0), ("redraft_requests_running", 0.0), ("redraft_worker_up", 1.0),
        ("redraft_steps", 3.0), ("redraft_sequence_steps", 0.0), ("redraft_accepted", 0.0),
    ]  # fmt: skip
