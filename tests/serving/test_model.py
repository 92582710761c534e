"""The base of the Triton models and their metrics, without Triton."""

from __future__ import annotations

import importlib
import queue
import sys
import threading
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from redraft.request import PROTOCOL_LIMITS, GenerateRequest
from redraft.serving.fields import ENSEMBLE
from redraft.worker.protocol import Chunk, ErrorMessage, WorkerStatus


class Sender:
    def __init__(self):
        self.asked = 0

    def is_cancelled(self) -> bool:
        self.asked += 1
        return False


class Request:
    """Triton's request, with what cannot be read in `broken`."""

    def __init__(self, parameters: object = "", inputs: object = (), request_id: object = ""):
        self.sender, self._parameters, self._inputs, self._id = Answers(), parameters, inputs, request_id

    def get_response_sender(self):
        return self.sender

    def inputs(self):
        return self._read(self._inputs)

    def parameters(self):
        return self._read(self._parameters)

    def request_id(self):
        return self._read(self._id)

    def _read(self, value):
        if isinstance(value, Exception):
            raise value
        return value


class Answers(list):
    """A sender that keeps the errors that it sends; `fault` is raised instead."""

    fault: Exception | None = None

    def send(self, response, flags):
        if self.fault:
            raise self.fault
        self.append(response.error)

    def is_cancelled(self) -> bool:
        raise RuntimeError("Triton does not know")


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
    class Error(str):
        INVALID_ARG, INTERNAL, UNAVAILABLE, CANCELLED = "invalid", "internal", "unavailable", "cancelled"

        def __new__(cls, text: str, code: str):
            return super().__new__(cls, f"{code}: {text}")

    logged: list[str] = []
    stand_in = SimpleNamespace(
        MetricFamily=Family,
        TritonError=Error,
        InferenceResponse=lambda error: SimpleNamespace(error=error),
        Logger=SimpleNamespace(log_error=logged.append),
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in)
    loaded = importlib.import_module("redraft.serving.model")
    monkeypatch.setattr(loaded, "pb_utils", stand_in)
    loaded.logged = logged
    return loaded


@pytest.fixture
def model(module):
    """A model whose worker remembers what it was told."""
    made = module.GenerationModel()
    told: list[tuple] = []
    made._client = SimpleNamespace(
        new_id=lambda: "r0",
        prompt_limits=PROTOCOL_LIMITS,
        submit=lambda request, on_message: told.append(("submit", request.text)),
        cancel=lambda request_id: told.append(("cancel", request_id)),
        told=told,
    )
    made.contract, made._decoupled, made._exclude_input = ENSEMBLE, True, True
    made._in_flight, made._messages, made._poll_from = {}, queue.SimpleQueue(), 0
    return made


@pytest.mark.parametrize("field", ["parameters", "request_id"])
def test_parameters_that_are_not_utf_8_are_refused_in_one_line(model, field):
    request = Request(**{field: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")})
    model.execute([request])
    assert request.sender == ["invalid: id and unknown fields: expected UTF-8 text, got invalid start byte"]


@pytest.mark.parametrize("fault", [{"parameters": LookupError("a bug")}, {"inputs": LookupError("a bug")}])
def test_an_error_of_ours_ends_one_request_of_several(module, model, fault):
    tensors = {"text_input": np.array([[b"hi"]], np.object_), "max_tokens": np.array([[4]], np.int32)}
    inputs = [SimpleNamespace(name=lambda n=name: n, as_numpy=lambda t=tensor: t) for name, tensor in tensors.items()]
    bad, good = Request(**fault), Request(inputs=inputs)
    model.execute([bad, good])
    assert bad.sender == ["internal: internal error: the Triton server's log has the cause"]
    assert (good.sender, model._client.told[-1]) == ([], ("submit", "hi"))
    assert "LookupError: a bug" in module.logged[-1]


def test_a_response_that_fails_ends_one_request(module, model):
    request = GenerateRequest(id="r", text="x", max_tokens=1)
    answers = {name: Answers() for name in ("r", "other")}
    model._in_flight = {name: module.Exchange(request, sender) for name, sender in answers.items()}
    model._deliver(Chunk(id="r", text="x", done=True))
    assert answers["r"] == ["internal: internal error: the Triton server's log has the cause"], "tensors() is missing"
    assert "NotImplementedError" in module.logged[-1]
    model._deliver(Chunk(id="r", text="late"))
    answers["other"].fault = OSError("the client is gone")
    model._deliver(Chunk(id="other", text="x", done=True))
    assert model._in_flight == {}
    assert model._client.told == [("cancel", "r"), ("cancel", "other")]


def test_an_answer_to_a_request_that_was_given_up_meanwhile(module, model):
    """By another thread: after the answer's request was looked up, before it is taken out."""
    answers = Answers()
    exchange = module.Exchange(GenerateRequest(id="r", text="x", max_tokens=1), answers)
    model._in_flight = SimpleNamespace(get=lambda request_id: exchange, pop={}.pop, __delitem__={}.pop)
    model._deliver(ErrorMessage(id="r", code="overloaded", message="full"))
    assert answers == ["unavailable: full"]


def test_a_request_that_triton_cannot_be_asked_about_is_given_up(module, model):
    answers = Answers()
    model._in_flight = {"r": module.Exchange(GenerateRequest(id="r", text="x", max_tokens=1), answers)}
    model._pass_on_cancellations()
    model._pass_on_cancellations()
    assert len(answers) == len(module.logged) == 1


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
