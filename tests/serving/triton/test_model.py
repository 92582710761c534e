"""The base of the Triton models and their metrics, without Triton."""

from __future__ import annotations

import importlib
import itertools
import json
import queue
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from redraft.errors import Code
from redraft.request import PROTOCOL_LIMITS, GenerateRequest
from redraft.serving.triton.fields import ENSEMBLE
from redraft.worker.client import WorkerMessage
from redraft.worker.protocol import Chunk, ErrorMessage
from tests.conftest import wait_until


class Sender(list):
    """A sender that keeps the errors that it sends and how often it was asked; `fault` is raised instead of sending,
    `unknown` instead of an answer."""

    fault: Exception | None = None
    unknown: Exception | None = None
    asked = 0

    def send(self, response, flags):
        if self.fault:
            raise self.fault
        self.append(response.error)

    def is_cancelled(self) -> bool:
        self.asked += 1
        if self.unknown:
            raise self.unknown
        return False


class Request:
    """Triton's request; an exception given as a part is raised where the part is read."""

    def __init__(self, parameters: object = "", inputs: object = None, request_id: object = "", **changes: np.ndarray):
        tensors = {"text_input": np.array([[b"hi"]], np.object_), "max_tokens": np.array([[4]], np.int32)} | changes
        usual = [SimpleNamespace(name=lambda n=n: n, as_numpy=lambda t=tensor: t) for n, tensor in tensors.items()]
        self.sender, self._parameters, self._inputs, self._id = Sender(), parameters, inputs or usual, request_id

    def get_response_sender(self):
        return self.sender

    def inputs(self):
        return self._read(self._inputs)

    def parameters(self):
        return self._read(self._parameters)

    def request_id(self):
        return self._read(self._id)

    def timeout(self):
        return 0

    def _read(self, value):
        if isinstance(value, Exception):
            raise value
        return value


class Client:
    """A worker's client that keeps what it is told. `answer` is a worker's message."""

    prompt_limits = PROTOCOL_LIMITS

    def __init__(self, socket: str):
        self.told: list[tuple[str, str]] = []
        self.receivers: dict[str, Callable[[WorkerMessage], None]] = {}
        self.ids = map("r{}".format, itertools.count())

    def wait_connected(self, timeout: float) -> bool:
        return True

    def new_id(self) -> str:
        return next(self.ids)

    def submit(self, request: GenerateRequest, on_message: Callable[[WorkerMessage], None]) -> None:
        self.told.append(("submit", request.id))
        self.receivers[request.id] = on_message

    def cancel(self, request_id: str) -> None:
        self.told.append(("cancel", request_id))

    def answer(self, message: WorkerMessage) -> None:
        self.receivers[message.id](message)

    def close(self) -> None:
        pass


@pytest.fixture
def module(monkeypatch):
    class Error(str):
        INVALID_ARG, INTERNAL, UNAVAILABLE, CANCELLED = "invalid", "internal", "unavailable", "cancelled"

        def __new__(cls, text: str, code: str):
            return super().__new__(cls, f"{code}: {text}")

    logged: list[str] = []
    stand_in = SimpleNamespace(
        TritonError=Error,
        InferenceResponse=lambda tensors=None, error=None: SimpleNamespace(tensors=tensors, error=error),
        Logger=SimpleNamespace(log_error=logged.append),
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        using_decoupled_model_transaction_policy=lambda config: True,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in)
    loaded = importlib.import_module("redraft.serving.triton.model")
    for part in (loaded, importlib.import_module("redraft.serving.triton.backend")):
        monkeypatch.setattr(part, "pb_utils", stand_in)
    loaded.logged = logged
    return loaded


@pytest.fixture
def client(module, monkeypatch) -> Client:
    """The client of the model's worker."""
    made = Client("")
    monkeypatch.setattr(module, "WorkerClient", lambda socket: made)
    return made


@pytest.fixture
def model(module, client, monkeypatch, tmp_path):
    """A model that Triton has initialized."""
    monkeypatch.setenv("REDRAFT_WORKER_SOCKET", str(tmp_path / "worker.sock"))
    made = module.GenerationModel()
    made.contract = ENSEMBLE
    config = {"parameters": {"exclude_input_in_output": {"string_value": "true"}}}
    made.initialize({"model_name": "ensemble", "model_config": json.dumps(config)})
    yield made
    made.finalize()


@pytest.mark.parametrize("field", ["parameters", "request_id"])
def test_parameters_that_are_not_utf_8_are_refused_in_one_line(model, field):
    request = Request(**{field: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")})
    model.execute([request])
    said = "id and unknown fields: expected UTF-8 text, got invalid start byte"
    assert request.sender == [f"invalid: [invalid_request] {said}"]


@pytest.mark.parametrize("fault", [{"parameters": LookupError("a bug")}, {"inputs": LookupError("a bug")}])
def test_an_error_of_ours_ends_one_request_of_several(module, model, client, fault):
    bad, good = Request(**fault), Request()
    model.execute([bad, good])
    assert bad.sender == ["internal: [internal_error] internal error: the Triton server's log has the cause"]
    assert (good.sender, client.told[-1]) == ([], ("submit", "r1"))
    assert "LookupError: a bug" in module.logged[-1]


def test_a_response_that_fails_ends_one_request(module, model, client):
    """The base model's, as `tensors()` is missing; and one whose client is gone."""
    requests = [Request(), Request()]
    requests[1].sender.fault = OSError("the client is gone")
    model.execute(requests)
    client.answer(Chunk(id="r0", text="x", done=True))
    wait_until(lambda: requests[0].sender)
    assert requests[0].sender == ["internal: [internal_error] internal error: the Triton server's log has the cause"]
    assert "NotImplementedError" in module.logged[-1]
    client.answer(Chunk(id="r0", text="late"))
    client.answer(Chunk(id="r1", text="x", done=True))
    wait_until(lambda: len(client.told) == 4)
    assert client.told[2:] == [("cancel", "r0"), ("cancel", "r1")]
    assert len(requests[0].sender) == 1


def test_a_request_that_triton_cannot_be_asked_about_is_given_up(module, model):
    request = Request()
    request.sender.unknown = RuntimeError("Triton does not know")
    model.execute([request])
    wait_until(lambda: request.sender)
    time.sleep(3 * module.CANCELLATION_POLL_S)
    assert (len(request.sender), len(module.logged), request.sender.asked) == (1, 1, 1)


def test_many_requests_in_flight_are_asked_about_in_turn(module, model):
    """A question takes Triton 30 us: asking about thousands at once would hold up every response."""
    requests, begun = [Request() for _ in range(100)], time.monotonic()
    model.execute(requests)
    wait_until(lambda: all(request.sender.asked for request in requests))
    polls = 100 / module.CANCELLATIONS_PER_POLL
    assert time.monotonic() - begun > (polls - 2) * module.CANCELLATION_POLL_S
    assert max(request.sender.asked for request in requests) <= 2


class CountedQueue(queue.SimpleQueue):
    waits = 0

    def get(self, *args, **options):
        CountedQueue.waits += 1
        return super().get(*args, **options)


@pytest.fixture
def counted(module, monkeypatch):
    CountedQueue.waits = 0
    monkeypatch.setattr(module, "queue", SimpleNamespace(SimpleQueue=CountedQueue, Empty=queue.Empty))


def test_the_response_thread_sleeps_while_nothing_is_in_flight(counted, module, model, client):
    """It asks about cancellations every 20 ms, but only as long as there is a request to ask about."""
    wait_until(lambda: CountedQueue.waits == 1)
    time.sleep(5 * module.CANCELLATION_POLL_S)
    assert CountedQueue.waits == 1
    request = Request()
    model.execute([request])
    wait_until(lambda: request.sender.asked > 2)
    client.answer(ErrorMessage(id="r0", code=Code.UNAVAILABLE, message="later"))
    wait_until(lambda: request.sender)
    assert request.sender == ["unavailable: [service_unavailable] later"]
    before = CountedQueue.waits
    time.sleep(5 * module.CANCELLATION_POLL_S)
    assert CountedQueue.waits <= before + 1
