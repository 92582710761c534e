"""The non-decoupled service: one response per request, over unary gRPC and HTTP infer."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.conftest import wait_until
from tests.serving.client_side import EVERY_FIELD, FAKE_WORKER, HTTP, SLOW_S, Service, grpc_inputs, start, told

ANSWER = " w0é w1é w2é w3é"


@pytest.fixture(scope="module")
def service(run_folder, fake_bundle):
    return start(run_folder, fake_bundle, worker_command=FAKE_WORKER, decoupled=False)


def http_infer(service: Service, **fields) -> dict:
    inputs = [
        {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [fields["text_input"]]},
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [fields["max_tokens"]]},
    ]
    return HTTP.post(f"{service.url}/v2/models/ensemble/infer", json={"inputs": inputs}, timeout=120).json()


def test_unary_grpc(service):
    with grpcclient.InferenceServerClient(service.grpc) as client:
        inputs = grpc_inputs(text_input="hi", max_tokens=4, temperature=0.0, return_log_probs=True)
        outputs = [grpcclient.InferRequestedOutput(name) for name in ("text_output", "cum_log_probs")]
        result = client.infer("ensemble", inputs, outputs=outputs)
        assert result.as_numpy("text_output").tolist() == [ANSWER.encode()]
        assert result.as_numpy("cum_log_probs").tolist() == [[-2.0]]
        ids = client.infer("tensorrt_llm", grpc_inputs(input_ids=[5], input_lengths=1, request_output_len=3))
        assert np.array_equal(ids.as_numpy("output_ids"), [[[0, 1, 2]]])


def test_a_client_written_for_tensorrt_llm(service):
    with grpcclient.InferenceServerClient(service.grpc) as client:
        result = client.infer("ensemble", grpc_inputs(stream=False, **EVERY_FIELD), parameters={"Streaming": False})
        assert result.as_numpy("text_output")[0].decode("utf-8") == ANSWER
        assert result.as_numpy("output_log_probs")[0][0].tolist() == [-0.5] * 4


def test_http_infer_and_generate(service):
    outputs = {output["name"]: output for output in http_infer(service, text_input="hi", max_tokens=4)["outputs"]}
    assert outputs["text_output"]["data"] == [ANSWER]
    assert outputs["text_output"]["shape"] == [1]
    assert service.generate({"text_input": "hi", "max_tokens": 4})["text_output"] == ANSWER


def test_requests_run_side_by_side(service):
    answers: list[dict] = []
    fields = {"text_input": "hi", "max_tokens": 4}
    threads = [threading.Thread(target=lambda: answers.append(http_infer(service, **fields))) for _ in range(4)]
    with told(service, "hold"):
        for thread in threads:
            thread.start()
        wait_until(lambda: service.metrics()["redraft_num_requests_running"] == 4)
    for thread in threads:
        thread.join()
    assert all("outputs" in answer for answer in answers)


def test_errors(service):
    assert "max_tokens: expected at most 512" in http_infer(service, text_input="hi", max_tokens=9999)["error"]
    with grpcclient.InferenceServerClient(service.grpc) as client:
        for prompt, tokens, status in (("hi", 0, "INVALID_ARGUMENT"), ("overload", 4, "UNAVAILABLE")):
            with pytest.raises(InferenceServerException) as caught:
                client.infer("ensemble", grpc_inputs(text_input=prompt, max_tokens=tokens))
            assert caught.value.status() == f"StatusCode.{status}"
    assert "--decoupled" in service.generate({"text_input": "hi", "max_tokens": 4, "stream": True})["error"]


def test_a_stop_request_over_unary_calls(service):
    """As TensorRT-LLM's client sends it without --streaming."""
    results: queue.SimpleQueue = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(service.grpc) as client:
        long = grpc_inputs(input_ids=[0], input_lengths=1, request_output_len=400)
        client.async_infer("tensorrt_llm", long, lambda result, error: results.put((result, error)), request_id="u")
        wait_until(lambda: service.metrics()["redraft_num_requests_running"] == 1)
        stop = grpc_inputs(input_ids=[0], input_lengths=0, request_output_len=0, stop=True)
        assert client.infer("tensorrt_llm", stop, request_id="u").as_numpy("output_ids") is None
        result, error = results.get(timeout=60)
        assert error is None
        assert result.as_numpy("output_ids").shape == (1, 1, result.as_numpy("sequence_length").item())
        assert result.as_numpy("sequence_length") < 400


def test_a_timeout_over_grpc(service):
    with grpcclient.InferenceServerClient(service.grpc) as client:
        with pytest.raises(InferenceServerException, match=r"Request timeout expired: .* within 0\.15 s") as caught:
            client.infer("ensemble", grpc_inputs(text_input="slow", max_tokens=400), timeout=150_000)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_cancelling_a_unary_call(service):
    with grpcclient.InferenceServerClient(service.grpc) as client:
        done = threading.Event()
        call = client.async_infer(
            "ensemble", grpc_inputs(text_input="slow", max_tokens=400), lambda result, error: done.set()
        )
        wait_until(lambda: service.metrics()["redraft_num_requests_running"] == 1)
        call.cancel()
        wait_until(lambda: service.metrics()["redraft_num_requests_running"] == 0, timeout=SLOW_S / 2)
        assert done.wait(60)


def test_a_worker_that_dies_fails_its_request(service):
    restarting = pytest.raises(InferenceServerException, match="worker is restarting")
    with told(service, "away"):
        assert "worker went away" in service.generate({"text_input": "die", "max_tokens": 9})["error"]
        with grpcclient.InferenceServerClient(service.grpc) as client, restarting:
            client.infer("ensemble", grpc_inputs(text_input="hi", max_tokens=4))
    wait_until(lambda: "outputs" in http_infer(service, text_input="hi", max_tokens=4))
