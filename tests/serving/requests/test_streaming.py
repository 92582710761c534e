"""The decoupled service as existing clients use it; bad input; what happens when a part of it dies."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from redraft.loadtest.clients.base import Generation
from redraft.loadtest.clients.connect import connect
from redraft.serving.guard.limits import MAX_BODY_BYTES
from redraft.serving.rundir import RunDir
from redraft.serving.tritonserver import MODELS, STAND_IN, WHOLE
from tests.conftest import wait_until
from tests.serving.client_side import EVERY_FIELD, HTTP, SLOW_S, GrpcStream, grpc_inputs, told

ANSWER = " w0é w1é w2é w3é"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_load_tests_clients(service, protocol):
    """A client of a load test that sends what the service refuses, or reads what it does not send."""

    async def ask():
        client = await connect(protocol, {"grpc": service.grpc, "http": service.url}[protocol], None, None)
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 2**63, "min_length": 2}
        try:
            return [piece.text async for piece in client.stream(Generation("hi", 4, sampling, ("no",)))]
        finally:
            await client.close()

    assert "".join(asyncio.run(ask())) == ANSWER


def test_generate_with_log_probs_and_input(service):
    body = {"text_input": "hi", "max_tokens": 4, "return_log_probs": True, "exclude_input_in_output": False}
    answer = service.generate(body)
    assert answer["text_output"] == "hi" + ANSWER
    assert answer["cum_log_probs"] == -2.0
    assert answer["output_log_probs"] == [-0.5] * 4


def test_generate_stream_gives_new_text_only(service):
    events = service.generate_stream({"text_input": "hi", "max_tokens": 4, "stream": True})
    assert [event["text_output"] for event in events] == [" w0é", " w1é", " w2é", " w3é"]


def test_grpc_stream_ends_with_a_final_response(service, stream):
    stream.send(request_id="r7", text_input="hi", max_tokens=4, stream=True, temperature=0.7, top_p=0.9)
    results = stream.receive_all()
    assert b"".join(result.as_numpy("text_output")[0] for result in results).decode() == ANSWER
    assert [result.get_response().id for result in results] == ["r7"] * 4, "the last chunk itself is the final response"


def test_a_client_written_for_tensorrt_llm(service, stream):
    stream.send(request_id="1", stream=True, **EVERY_FIELD)
    results = stream.receive_all()
    assert "".join(result.as_numpy("text_output")[0].decode("utf-8") for result in results) == ANSWER
    assert [result.as_numpy("sequence_index")[0][0] for result in results] == [0] * 4
    assert results[-1].as_numpy("cum_log_probs")[0][0] == -2.0


def test_token_ids(service, stream):
    stream.send("tensorrt_llm", input_ids=[5, 6, 0], input_lengths=2, request_output_len=3, end_id=2, pad_id=2,
                streaming=True, return_log_probs=True, runtime_top_k=1)  # fmt: skip
    results = stream.receive_all()
    assert [result.as_numpy("output_ids").tolist() for result in results] == [[[[0]]], [[[1]]], [[[2]]]]
    assert [result.as_numpy("sequence_length").tolist() for result in results] == [[[1]]] * 3
    assert [float(result.as_numpy("cum_log_probs")[0, 0]) for result in results] == [-0.5, -1.0, -1.5]
    stream.send("tensorrt_llm", input_ids=[5, 6, 0], input_lengths=2, request_output_len=2,
                exclude_input_in_output=False)  # fmt: skip
    (result,) = stream.receive_all()
    assert result.as_numpy("output_ids").tolist() == [[[5, 6, 0, 1]]]


def test_requests_run_side_by_side(service):
    answers: list[dict] = []
    body = {"text_input": "hi", "max_tokens": 4}
    threads = [threading.Thread(target=lambda: answers.append(service.generate(body))) for _ in range(16)]
    with told(service, "hold"):
        for thread in threads:
            thread.start()
        wait_until(lambda: service.metrics()["redraft_num_requests_running"] == 16)
    for thread in threads:
        thread.join()
    assert len(answers) == 16
    assert all(answer["text_output"] == ANSWER for answer in answers), answers


BAD_REQUESTS = [
    ({"max_tokens": 4}, "text_input"),
    ({"text_input": "hi"}, "max_tokens"),
    ({"text_input": 5, "max_tokens": 4}, "non-string"),
    ({"text_input": ["a", "b"], "max_tokens": 4}, "batch size"),
    ({"text_input": "hi", "max_tokens": "many"}, "non-signed-integer"),
    ({"text_input": "hi", "max_tokens": 1.5}, "non-signed-integer"),
    ({"text_input": "hi", "max_tokens": [1, 2]}, "batch size"),
    ({"text_input": "hi", "max_tokens": 0}, "max_tokens.*got 0"),
    ({"text_input": "hi", "max_tokens": 10**6}, "max_tokens: expected at most 512, got 1000000"),
    ({"text_input": "hi", "max_tokens": 99999999999}, "max_tokens: expected integers of at most 32 bits"),
    ({"text_input": "hi", "max_tokens": 4, "max_token": 4}, "unknown field 'max_token'"),
    ({"text_input": "hi", "max_tokens": 4, "x": "x" * 2**20}, "id and unknown fields: expected at most 10000 char"),
    (
        {"text_input": "overload", "max_tokens": 4},
        "full.*Exceeds maximum queue size. Maximum queue size of",
    ),
    ('{"text_input": "hi", "max_tokens": 4, "temperature": NaN}', "temperature.*got nan"),
]


def test_bad_requests_get_a_clear_message_and_harm_no_neighbour(service, stream):
    stream.send(text_input="slow neighbour", max_tokens=40, stream=True)
    stream.receive()
    for body, message in BAD_REQUESTS:
        answer = service.generate(body)
        assert set(answer) == {"error", "code"}, body
        assert_matches(message, answer["error"])
        assert "model.py" not in answer["error"]
        assert len(answer["error"]) < 700
    results = stream.receive_all()
    assert len(results) == 39, "the neighbour's other chunks all came"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_input": "hi", "max_tokens": 4, "temperature": float("nan")}, "temperature.*nan"),
        ({"text_input": b"\xff", "max_tokens": 4}, "text_input: expected UTF-8"),
        ({"text_input": "hi", "max_tokens": 4, "surprise": 1}, "surprise"),
        ({"text_input": "hi", "max_tokens": 4.0}, "FP32.*INT32"),
        ({"text_input": ["a", "b"], "max_tokens": 4}, "shape"),
        ({"text_input": "hi"}, "max_tokens"),
    ],
)
def test_bad_grpc_requests(service, stream, fields, message):
    stream.send(**fields)
    with pytest.raises(InferenceServerException) as caught:
        stream.receive()
    assert_matches(message, str(caught.value))
    stream.send(text_input="hi", max_tokens=1)
    assert len(stream.receive_all()) == 1, "the stream goes on"


def test_a_huge_request_is_refused_before_triton_sees_it(service, stream):
    """Triton would hold all of it in memory, and its shared memory would grow for good."""
    huge = {"text_input": "a" * (MAX_BODY_BYTES + 1), "max_tokens": 4}
    assert "the body is too large" in service.generate(huge)["error"]
    stream.send(**huge)
    with pytest.raises(InferenceServerException, match="message larger than max") as caught:
        stream.receive()
    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_unary_calls_are_refused_in_this_mode(service):
    with grpcclient.InferenceServerClient(service.grpc) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("ensemble", grpc_inputs(text_input="hi", max_tokens=1))
    assert "decoupled" in str(caught.value)


def test_a_timeout_over_http(service):
    """The text so far has come by then."""
    body = {"text_input": "slow", "max_tokens": 400, "timeout": 150_000}
    assert "Request timeout expired: it did not end within 0.15 s" in service.generate(body)["error"]
    *chunks, last = service.generate_stream(body | {"stream": True, "timeout": 1_000_000})
    assert [chunk["text_output"] for chunk in chunks][:2] == [" w0é", " w1é"]
    assert "Request timeout expired" in last["error"]


def test_cancelling_frees_the_slot_at_once(service):
    connection = GrpcStream(service.grpc)
    connection.send(text_input="slow", max_tokens=400, stream=True)
    connection.receive()
    wait_until(lambda: service.metrics()["redraft_num_requests_running"] == 1)
    connection.close(cancel=True)
    wait_until(lambda: service.metrics()["redraft_num_requests_running"] == 0, timeout=SLOW_S / 2)


def test_a_client_that_disconnects_harms_nobody(service):
    url = f"{service.url}/v2/models/ensemble/generate_stream"
    body = {"text_input": "slow", "max_tokens": 400, "stream": True}
    with HTTP.stream("POST", url, json=body, timeout=60) as response:
        next(response.iter_lines())
    assert service.generate({"text_input": "hi", "max_tokens": 4})["text_output"] == ANSWER
    wait_until(lambda: service.metrics()["redraft_num_requests_running"] == 0, timeout=SLOW_S / 2)


def test_the_workers_metrics_follow_tritons_own(service):
    before = service.metrics()
    service.generate({"text_input": "hi", "max_tokens": 5})
    metrics = service.metrics()
    assert metrics["redraft_engine_sequence_steps_total"] == before["redraft_engine_sequence_steps_total"] + 5
    assert (metrics["redraft_worker_up"], metrics["redraft_worker_restarts"]) == (1, service.state.worker_restarts)
    text = HTTP.get(f"http://127.0.0.1:{service.settings.metrics_port}/metrics", timeout=60).text
    assert 'nv_inference_request_success{model="ensemble",version="1"}' in text


def test_a_worker_that_dies_fails_its_requests_and_comes_back(service):
    """And again, where the model that stands for it in Triton's health was never unloaded. Health follows, and the
    repository has the models only."""
    before = service.state.worker_restarts
    for restarts in (before + 1, before + 2):
        with answers_of(service.ready) as said:
            with told(service, "away"):
                events = service.generate_stream({"text_input": "die", "max_tokens": 9, "stream": True})
                assert len(events) == 3
                assert "worker went away" in events[-1]["error"]
                answer = service.generate({"text_input": "hi", "max_tokens": 4})
                assert "worker is restarting" in answer["error"], "answered at once while there is no worker"
                wait_until(lambda: False in said)
            wait_until(lambda: service.generate({"text_input": "hi", "max_tokens": 4}).get("text_output") == ANSWER)
            wait_until(lambda: service.state.phase == "ready")
        assert service.ready()
        assert {folder.name for folder in service.run_dir.models.iterdir()} == set(MODELS)
        assert service.state.worker_restarts == restarts
        wait_until(lambda: service.metrics()["redraft_worker_up"] == 1)
        load_stand_in(service.run_dir)


@contextmanager
def answers_of(question: Callable[[], bool]) -> Iterator[list[bool]]:
    """What a question that is asked again and again from a thread is answered."""
    said: list[bool] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.02):
            said.append(question())

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield said
    finally:
        over.set()
        thread.join()


def load_stand_in(run_dir: RunDir) -> None:
    link = run_dir.models / STAND_IN
    link.symlink_to(Path("..", run_dir.stand_ins.name, WHOLE))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(run_dir.http_socket))) as client:
        client.post(f"http://triton/v2/repository/models/{STAND_IN}/load", json={}).raise_for_status()
    link.unlink()


@pytest.mark.parametrize("victim", ["stub", "server"])
def test_triton_comes_back(service, victim):
    wait_until(lambda: service.state.phase == "ready")
    restarts = service.state.triton_restarts
    server = psutil.Process(service.state.triton_pid)
    (server if victim == "server" else server.children()[0]).send_signal(signal.SIGKILL)
    wait_until(lambda: service.state.triton_restarts > restarts and service.state.phase == "ready")
    assert service.ready()
    assert service.generate({"text_input": "hi", "max_tokens": 4})["text_output"] == ANSWER


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text, re.IGNORECASE), text
