"""The way of TensorRT-LLM's end-to-end scripts: `preprocessing`, `tensorrt_llm` and `postprocessing` one after the
other give what `ensemble` gives."""

from __future__ import annotations

import json
import sys
import threading

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from redraft.serving import launcher
from redraft.serving.tritonserver import models_live
from tests.conftest import wait_until
from tests.serving.client_side import grpc_inputs, start
from tests.toy_engine import toy_tokenizer
from tests.worker.toy_worker import LIMITS

TOY_WORKER = [sys.executable, "-m", "tests.serving.requests.toy_engine_worker"]
PROMPT = "What is ä?"
NAME = "x;touch PWNED;y ü $(touch PWNED) 'q\" %41#?"
"""Of the bundle's folder and of the run directory. Triton starts its models' processes through a shell, and with a
Python that takes paths for ASCII."""


@pytest.fixture(scope="module")
def toy_bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / NAME
    folder.mkdir()
    toy_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"limits": {"max_len": LIMITS.max_len}, "target": {"vocab_size": 111, "eos_token_ids": [0]}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def service(run_folder, toy_bundle):
    folder = run_folder / NAME
    yield start(folder, toy_bundle, worker_command=TOY_WORKER, decoupled=False)
    launcher.stop(folder)


@pytest.fixture(scope="module")
def client(service):
    with grpcclient.InferenceServerClient(service.grpc) as connected:
        yield connected


def test_a_tokenizer_is_read_when_a_request_comes(service, client):
    """Not by the supervisor's probes: a large one takes more memory than all else in its process."""
    read = "reads the tokenizer of"
    assert models_live(service.run_dir.http_socket, 60)
    assert read not in service.run_dir.triton_log.read_text()
    client.infer("preprocessing", grpc_inputs(QUERY="Hello", REQUEST_OUTPUT_LEN=1))
    assert service.run_dir.triton_log.read_text().count(read) == 1


def words(*items: str) -> np.ndarray:
    return np.array([items], np.object_)


def step_by_step(client, prompt: str, max_tokens: int, **lists: np.ndarray) -> bytes:
    """The text of the three models, with everything that the first one gives handed on."""
    given = client.infer("preprocessing", grpc_inputs(QUERY=prompt, REQUEST_OUTPUT_LEN=max_tokens, **lists))
    names = {
        "input_ids": "INPUT_ID", "input_lengths": "REQUEST_INPUT_LEN", "request_output_len": "REQUEST_OUTPUT_LEN",
        "decoder_input_ids": "DECODER_INPUT_ID", "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
        "end_id": "OUT_END_ID", "pad_id": "OUT_PAD_ID", "stop_words_list": "STOP_WORDS_IDS",
        "bad_words_list": "BAD_WORDS_IDS",
    }  # fmt: skip
    fields = {field: given.as_numpy(name) for field, name in names.items()}
    answer = client.infer("tensorrt_llm", grpc_inputs(**fields))
    tokens, length = answer.as_numpy("output_ids"), answer.as_numpy("sequence_length")
    decoded = client.infer("postprocessing", grpc_inputs(TOKENS_BATCH=tokens, SEQUENCE_LENGTH=length))
    (text,) = decoded.as_numpy("OUTPUT").tolist()
    return text


def test_names_of_folders_are_no_commands(service, run_folder, toy_bundle):
    assert service.ready()
    assert not [*run_folder.rglob("PWNED"), *toy_bundle.parent.rglob("PWNED")]


def at_once(client, prompt: str, max_tokens: int, **lists: np.ndarray) -> bytes:
    result = client.infer("ensemble", grpc_inputs(text_input=prompt, max_tokens=max_tokens, **lists))
    return result.as_numpy("text_output")[0]


def test_three_models_give_what_one_gives(client):
    text = at_once(client, PROMPT, 40)
    assert step_by_step(client, PROMPT, 40) == text
    empty = words("")
    assert step_by_step(client, PROMPT, 40, STOP_WORDS_DICT=empty, BAD_WORDS_DICT=empty) == text


def test_words_go_along(client):
    text = at_once(client, PROMPT, 40).decode(errors="replace")
    stop, bad = text[3:5], text[2]
    stopped = step_by_step(client, PROMPT, 40, STOP_WORDS_DICT=words("never", stop))
    assert stopped == at_once(client, PROMPT, 40, stop_words=words("never", stop))
    assert stopped.decode(errors="replace") == text[: text.index(stop) + 2]
    without = step_by_step(client, PROMPT, 40, BAD_WORDS_DICT=words(bad))
    assert without == at_once(client, PROMPT, 40, bad_words=words(bad))
    assert bad not in without.decode(errors="replace")


def test_what_preprocessing_gives(client):
    lists = {"STOP_WORDS_DICT": words("ab", " c"), "END_ID": 7}
    given = client.infer("preprocessing", grpc_inputs(QUERY="abc", REQUEST_OUTPUT_LEN=5, **lists))
    a, b, c, space = (toy_tokenizer().token_to_id(token) for token in ("a", "b", "c", "Ġ"))
    expected = {
        "INPUT_ID": [[a, b, c]], "REQUEST_INPUT_LEN": [[3]], "REQUEST_OUTPUT_LEN": [[5]], "DECODER_INPUT_ID": [[7]],
        "REQUEST_DECODER_INPUT_LEN": [[1]], "OUT_END_ID": [[7]], "OUT_PAD_ID": [[7]],
        "STOP_WORDS_IDS": [[[a, b, space, a, b, space, c], [2, 5, 7, -1, -1, -1, -1]]], "BAD_WORDS_IDS": [[[], []]],
    }  # fmt: skip
    assert {output.name: given.as_numpy(output.name).tolist() for output in given.get_response().outputs} == expected
    assert {output.datatype for output in given.get_response().outputs} == {"INT32"}


def test_several_sequences_are_decoded(client):
    ids = np.array([[[toy_tokenizer().token_to_id(token) for token in "abc"], [0, -1, -1]]], np.int32)
    lengths = np.array([[2, 1]], np.int32)
    decoded = client.infer("postprocessing", grpc_inputs(TOKENS_BATCH=ids, SEQUENCE_LENGTH=lengths))
    assert decoded.as_numpy("OUTPUT").tolist() == [b"ab", b""]


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("preprocessing", {"QUERY": "", "REQUEST_OUTPUT_LEN": 5}, "QUERY is empty"),
        ("preprocessing", {"QUERY": b"\xff", "REQUEST_OUTPUT_LEN": 5}, "QUERY: expected UTF-8"),
        ("preprocessing", {"QUERY": "x" * 2000, "REQUEST_OUTPUT_LEN": 5}, "QUERY: 2000 bytes cannot fit"),
        ("preprocessing", {"QUERY": "x", "REQUEST_OUTPUT_LEN": 0}, "REQUEST_OUTPUT_LEN: .*got 0"),
        (
            "preprocessing",
            {"QUERY": "x", "REQUEST_OUTPUT_LEN": 5, "STOP_WORDS_DICT": words(*"a" * 65)},
            "STOP_WORDS_DICT: expected at most 64 items",
        ),
        (
            "postprocessing",
            {"TOKENS_BATCH": np.array([[[1, -1]]], np.int32), "SEQUENCE_LENGTH": 2},
            "TOKENS_BATCH: expected token ids from 0 to 110, got -1",
        ),
        (
            "postprocessing",
            {"TOKENS_BATCH": np.array([[[1, 111]]], np.int32), "SEQUENCE_LENGTH": 2},
            "TOKENS_BATCH: expected token ids from 0 to 110, got 111",
        ),
        (
            "postprocessing",
            {"TOKENS_BATCH": np.array([[[1]]], np.int32), "SEQUENCE_LENGTH": 2},
            "SEQUENCE_LENGTH: expected 0 to 1, got 2",
        ),
        (
            "postprocessing",
            {"TOKENS_BATCH": np.array([[[1], [2]]], np.int32), "SEQUENCE_LENGTH": 1},
            "SEQUENCE_LENGTH: expected one for each of 2 sequences, got 1",
        ),
    ],
)
def test_what_is_wrong_is_named(client, model, fields, message):
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer(model, grpc_inputs(**fields))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_the_default_model(smollm2_bundle, run_folder):
    """As `ensemble` gives it, and the three models: a tokenizer whose tokens join over spaces, as the toy's do not. A
    worker that is killed fails the request that it had, and its successor answers as it did."""
    folder, prompt = run_folder / "real", "The capital of France is"
    service = start(folder, smollm2_bundle, decoupled=False)
    try:
        with grpcclient.InferenceServerClient(service.grpc) as client:
            text = at_once(client, prompt, 24)
            assert step_by_step(client, prompt, 24) == text
            assert b"Paris" in text
            stopped = at_once(client, prompt, 24, stop_words=words("answer"))
            assert stopped.endswith(b"answer")
            assert step_by_step(client, prompt, 24, STOP_WORDS_DICT=words("answer")) == stopped
        body = {"text_input": prompt, "max_tokens": 24}
        assert service.generate(body)["text_output"].encode() == text
        answers: list[dict] = []
        long = {"text_input": "Once upon a time", "max_tokens": 400, "end_id": -1}
        running = threading.Thread(target=lambda: answers.append(service.generate(long)))
        running.start()
        wait_until(lambda: service.metrics()["redraft_num_requests_running"] == 1)
        psutil.Process(service.state.worker_pid).kill()
        running.join(60)
        assert "worker went away" in answers[0]["error"]
        assert "worker is restarting" in service.generate(body)["error"]
        wait_until(lambda: service.state.worker_restarts == 1 and service.state.phase == "ready")
        assert service.generate(body)["text_output"].encode() == text
    finally:
        launcher.stop(folder)
