"""The worker and its client over a real socket, on the toy engine."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgpack
import pytest
import zmq

from redraft.errors import Code
from redraft.metrics import read
from redraft.request import PROTOCOL_LIMITS, GenerateRequest
from redraft.worker.client import WorkerClient, WorkerError
from redraft.worker.server import Worker, main
from tests.conftest import wait_until
from tests.worker.toy_worker import LIMITS, toy_runtime, wait_for_worker

TOY_WORKER = Path(__file__).with_name("toy_worker.py")
NEVER_ENDING = {"end_id": -1, "max_tokens": 200}
SLOW = NEVER_ENDING | {"method": "auto_regressive"}
"""A second and more: a token a step."""


@pytest.fixture
def worker(tmp_path):
    """A worker in a thread, 5 ms per step; yields its socket path and its runtime."""
    runtime = toy_runtime(0.005)
    served = Worker(runtime, tmp_path / "w.sock")
    thread = threading.Thread(target=served.run)
    thread.start()
    yield tmp_path / "w.sock", runtime
    served.stop()
    thread.join()
    assert not (tmp_path / "w.sock").exists()


@pytest.fixture
def client(worker):
    with WorkerClient(worker[0]) as connected:
        assert connected.wait_connected(60)
        yield connected


def request(client, text="hello", **fields):
    return GenerateRequest(**{"id": client.new_id(), "text": text, "max_tokens": 20, **fields})


def test_stream_and_whole_answer_agree(client):
    options = {"top_log_probs": 2, "prompt_log_probs": True, "sampling": {"logit_bias": {7: 2.0}}}
    chunks = list(client.generate(request(client, stream=True, **options), timeout=60))
    whole = client.complete(request(client, **options), timeout=60)
    assert len(chunks) > 3
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [value for chunk in chunks for value in chunk.log_probs] == whole.log_probs
    assert [top for chunk in chunks for top in chunk.top_log_probs] == whole.top_log_probs
    assert [len(top) for top in whole.top_log_probs] == [2] * 20
    assert (chunks[0].prompt_log_probs, chunks[1].prompt_log_probs) == (whole.prompt_log_probs, None)
    assert [value is None for value in whole.prompt_log_probs] == [True] + [False] * 4
    assert [len(top) for top in chunks[0].prompt_top_log_probs] == [0] + [2] * 4
    assert chunks[-1].finish_reason == whole.finish_reason == "length"
    assert whole.stats is not None
    assert whole.stats.output_tokens == 20


def test_text_and_its_token_ids_are_the_same_prompt(client, worker):
    ids = worker[1].codec.encode("hello")
    by_ids = client.complete(request(client, text=None, input_ids=ids), timeout=60)
    assert by_ids.text == client.complete(request(client), timeout=60).text
    echoed = client.complete(request(client, exclude_input_in_output=False), timeout=60)
    assert echoed.text == "hello" + by_ids.text


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a" * 240},
        {"bad_words": [f"x{i}" for i in range(20)]},
        {"bad_word_ids": [[i] for i in range(9)], "stop_word_ids": [[i] for i in range(9)]},
    ],
    ids=["text", "words", "token ids"],
)
def test_what_is_slow_to_encode_takes_the_helper_thread(client, worker, monkeypatch, fields):
    threads, sequence = [], worker[1].sequence

    def encode(*args):
        threads.append(threading.current_thread().name)
        return sequence(*args)

    monkeypatch.setattr("redraft.worker.server.INLINE_CHARACTERS", 100)
    monkeypatch.setattr(worker[1], "sequence", encode)
    for given in ({}, fields):
        assert client.complete(request(client, **{**given, "max_tokens": 1}), timeout=60).finish_reason in (
            "length",
            "stop",
        )
    assert [name.startswith("redraft-encode") for name in threads] == [False, True]


BAD = [
    ({"text": None}, "exactly one of text and input_ids"),
    ({"text": ""}, "text is empty"),
    ({"text": 7}, "text: input should be a valid string, got 7"),
    ({"text": "x" * 300}, "the prompt has 300 tokens: expected at most 255"),
    ({"text": "x" * 100_000}, "100000 bytes cannot fit a context of 256 tokens: expected at most 1275 bytes"),
    ({"text": None, "input_ids": []}, "input_ids is empty"),
    ({"text": None, "input_ids": [1, 111]}, "input_ids: expected token ids below 111, got 111"),
    ({"text": None, "input_ids": [-1]}, "input_ids[0]: input should be greater than or equal to 0, got -1"),
    ({"text": None, "input_ids": [1] * (2**20 + 1)}, "input_ids: expected at most 1048576 items, got 1048577"),
    ({"text": None, "input_ids": "abc"}, "input_ids: input should be a valid list"),
    ({"input_ids": [1]}, "exactly one of text and input_ids"),
    ({"colour": "red"}, "colour: unknown field"),
    ({"max_tokens": None}, "max_tokens: input should be a valid integer, got None"),
    ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
    ({"max_tokens": -5}, "max_tokens: expected at least 1, got -5"),
    ({"max_tokens": -5, "prompt_log_probs": True}, "max_tokens: expected at least 0, got -5"),
    ({"top_log_probs": 21}, "top_log_probs: input should be less than or equal to 20, got 21"),
    ({"max_tokens": 256}, "max_tokens: expected at most 251 after a prompt of 5 tokens in a context of 256, got 256"),
    ({"max_tokens": 99999999999}, "max_tokens: input should be less than or equal to 2147483647"),
    ({"max_tokens": 3.5}, "max_tokens: input should be a valid integer, got 3.5"),
    ({"max_tokens": True}, "max_tokens: input should be a valid integer, got True"),
    ({"sampling": {"temperature": -0.1}}, "sampling.temperature: input should be greater than or equal to 0"),
    ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
    ({"sampling": {"temperature": float("inf")}}, "sampling.temperature: input should be a finite number, got inf"),
    ({"sampling": {"temperature": "hot"}}, "sampling.temperature: input should be a valid number, got 'hot'"),
    ({"sampling": {"top_p": -0.1}}, "sampling.top_p: input should be greater than or equal to 0, got -0.1"),
    ({"sampling": {"top_p": 1.01}}, "sampling.top_p: input should be less than or equal to 1, got 1.01"),
    ({"sampling": {"top_k": -2}}, "sampling.top_k: input should be greater than or equal to -1, got -2"),
    ({"sampling": {"min_p": 1.5}}, "sampling.min_p: input should be less than or equal to 1, got 1.5"),
    ({"stop_token_ids": [111]}, "stop_token_ids: expected token ids below 111, got 111"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids: expected at most 64 items, got 65"),
    ({"sampling": {"seed": -2}}, "sampling.seed"),
    ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty"),
    ({"sampling": {"repetition_penalty": 1e-45}}, "sampling.repetition_penalty"),
    ({"sampling": {"presence_penalty": -3e38}}, "sampling.presence_penalty"),
    ({"sampling": {"frequency_penalty": 3e38}}, "sampling.frequency_penalty"),
    ({"sampling": {"frequency_penalty": float("nan")}}, "sampling.frequency_penalty"),
    ({"sampling": {"min_length": -1}}, "sampling.min_length"),
    ({"sampling": {"logit_bias": {111: 1.0}}}, "sampling.logit_bias: expected token ids below 111, got 111"),
    ({"sampling": {"logit_bias": {-1: 1.0}}}, "logit_bias[-1]: input should be greater than or equal to 0, got -1"),
    ({"sampling": {"logit_bias": {"1": 1.0}}}, "sampling.logit_bias.1: input should be a valid integer, got '1'"),
    ({"sampling": {"logit_bias": {1: 100.5}}}, "logit_bias[1]: input should be less than or equal to 100, got 100.5"),
    ({"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}}, "expected at most 1024 items, got 1025"),
    ({"sampling": {"beams": 2}}, "sampling.beams: unknown field"),
    ({"end_id": 111}, "end_id: expected an id below 111, got 111"),
    ({"stop_words": "x"}, "stop_words: input should be a valid list"),
    ({"stop_words": ["x"] * 65}, "stop_words: expected at most 64 items, got 65"),
    ({"bad_words": ["x" * 1001]}, "bad_words[0]: expected at most 1000 characters, got 1001"),
    ({"bad_words": [3]}, "bad_words[0]: input should be a valid string, got 3"),
    ({"stop_words": ["x" * 129] * 32}, "stop_words: expected at most 4096 characters in all, got 4128"),
    ({"bad_words": ["x" * 17] * 1000}, "bad_words: expected at most 16384 characters in all, got 17000"),
    ({"stop_word_ids": [[1]] * 65}, "stop_word_ids: expected at most 64 items, got 65"),
    ({"bad_word_ids": [[1] * 17] * 1000}, "bad_word_ids: expected at most 16384 token ids in all, got 17000"),
    ({"stop_word_ids": [[1], [5, -1]]}, "stop_word_ids[1][1]: input should be greater than or equal to 0, got -1"),
    ({"stop_word_ids": [[1], [5, 111]]}, "stop_word_ids: expected token ids below 111, got 111"),
    ({"bad_word_ids": [[111]]}, "bad_word_ids: expected token ids below 111, got 111"),
    ({"method": "x" * 201}, "method: expected at most 200 characters, got 201"),
    ({"x" * 2000: 1}, f"{'x' * 57}...: unknown field"),
    ({"id": ""}, "id: string should have at least 1 character"),
    ({"op": "explode"}, "op: expected one of generate, cancel, status, replaced, got 'explode'"),
]


def test_bad_requests_are_refused_and_harm_nobody(worker, client):
    running = client.generate(request(client, stream=True, **NEVER_ENDING), timeout=60)
    next(running)
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(f"ipc://{worker[0]}")
    dealer.setsockopt(zmq.RCVTIMEO, 60_000)
    for fields, expected in BAD:
        dealer.send(msgpack.packb({"op": "generate", "id": "bad", "text": "hello", "max_tokens": 5, **fields}))
        answer = msgpack.unpackb(dealer.recv())
        assert (answer["op"], Code(answer["code"]).http) == ("error", 400)
        assert expected in answer["message"], answer["message"]
    for data in (b"", b"\xc1", b"\x01\x02", msgpack.packb([1]), msgpack.packb({}), b"\xa2\xff\xfe", b"\x81\x90\x01"):
        dealer.send(data)
        assert msgpack.unpackb(dealer.recv())["code"] == "invalid_request"
    dealer.close(linger=0)
    rest = list(running)
    assert rest[-1].finish_reason == "length"


def test_every_running_and_waiting_request_beyond_the_queue_is_refused_at_once(client):
    running = [client.generate(request(client, stream=True, **SLOW), timeout=60) for _ in range(LIMITS.slots)]
    for chunks in running:
        next(chunks)
    waiting = [client.new_id() for _ in range(LIMITS.max_queue)]
    results: dict = {}
    for request_id in waiting:
        client.submit(request(client, id=request_id), lambda message: results.setdefault(message.id, message))
    wait_until(lambda: client.status().waiting == LIMITS.max_queue)
    with pytest.raises(WorkerError, match="try again later") as refused:
        client.complete(request(client), timeout=60)
    assert refused.value.code == "rate_limit_exceeded"
    assert client.status().waiting == LIMITS.max_queue, "answered before those who wait"
    for chunks in running:
        chunks.close()
    wait_until(lambda: set(results) == set(waiting))
    assert {message.done for message in results.values()} == {True}


def test_a_flood_is_refused_and_harms_nobody(client):
    running = client.generate(request(client, stream=True, **NEVER_ENDING), timeout=60)
    next(running)
    results: list = []
    flood = 4000
    for _ in range(flood):
        client.submit(request(client, text="x" * 9, max_tokens=200), results.append)
    assert list(running)[-1].finish_reason == "length"
    wait_until(lambda: len(results) == flood)
    assert {getattr(message, "code", "done") for message in results} == {"rate_limit_exceeded", "done"}


def test_a_request_too_large_to_send_harms_nobody(client):
    running = client.generate(request(client, stream=True, **NEVER_ENDING), timeout=60)
    next(running)
    with pytest.raises(WorkerError, match="bytes: expected at most 16777216") as refused:
        client.complete(request(client, text="x" * 17_000_000))
    assert refused.value.code == "invalid_request"
    assert list(running)[-1].finish_reason == "length"


def test_a_text_is_not_encoded_where_the_queue_is_full(client, worker, monkeypatch):
    for _ in range(LIMITS.slots + LIMITS.max_queue):
        client.submit(request(client, **SLOW), lambda message: None)
    wait_until(lambda: client.status().waiting == LIMITS.max_queue)
    monkeypatch.setattr(type(worker[1].codec), "encode", None)
    with pytest.raises(WorkerError, match="overloaded"):
        client.complete(request(client), timeout=60)


def test_the_largest_text_is_encoded_and_no_larger_one(client, worker, monkeypatch):
    """Every token of it is the longest of the vocabulary."""
    wait_until(lambda: client.prompt_limits == worker[1].prompt_limits)
    assert client.prompt_limits.tokens == LIMITS.max_len - 1
    largest = "<end>" * client.prompt_limits.tokens
    assert client.complete(request(client, text=largest, max_tokens=1), timeout=60).stats.output_tokens == 1
    monkeypatch.setattr(worker[1].codec, "encode", None)
    for text in (largest + "x", "é" * 700, "x" * 500_000):
        with pytest.raises(WorkerError, match=f"{len(text.encode())} bytes cannot fit"):
            client.complete(request(client, text=text), timeout=60)


@pytest.mark.parametrize("length", [5, 5000])
def test_an_error_of_ours_ends_one_request(client, worker, monkeypatch, capfd, length):
    """It comes while a request is encoded, in the worker's own thread or its helper's."""
    running = client.generate(request(client, stream=True, **NEVER_ENDING), timeout=60)
    next(running)
    sequence = worker[1].sequence

    def fail(key, wanted, *others):
        if wanted.text.startswith("x"):
            raise LookupError("a bug")
        return sequence(key, wanted, *others)

    monkeypatch.setattr(worker[1], "sequence", fail)
    monkeypatch.setattr(worker[1], "prompt_limits", PROTOCOL_LIMITS)
    with pytest.raises(WorkerError) as failed:
        client.complete(request(client, text="x" * length), timeout=60)
    assert failed.value.code == "internal_error"
    assert str(failed.value) == "the engine worker failed on this request: worker.log has the cause"
    assert "LookupError: a bug" in capfd.readouterr().err
    assert list(running)[-1].finish_reason == "length"
    assert client.complete(request(client), timeout=60).finish_reason == "length"


def steps(client) -> float:
    return read(client.status(metrics=True).metrics)["engine_steps_total"]


def test_cancel_and_status(client):
    chunks = client.generate(request(client, stream=True, **SLOW), timeout=60)
    next(chunks)
    steps_before = steps(client)
    status = client.status()
    assert (status.running, status.waiting, status.ready, status.bundle) == (1, 0, True, "toy")
    assert status.kv_use > 0
    assert status.limits["max_len"] == LIMITS.max_len
    chunks.close()
    wait_until(lambda: client.status().running == 0)
    assert steps(client) - steps_before < 150
    assert read(client.status(metrics=True).metrics)["requests_total"] == client.status().submitted == 1


def test_a_client_that_vanishes_is_cancelled(worker, client):
    for stream in (True, False):
        other = WorkerClient(worker[0])
        assert other.wait_connected(60)
        other.submit(request(other, stream=stream, **SLOW), lambda message: None)
        wait_until(lambda: client.status().running == 1)
        steps_before = steps(client)
        other.close()
        wait_until(lambda: client.status().running == 0)
        assert steps(client) - steps_before < 150


def test_requests_of_two_clients_with_one_id(worker, client):
    with WorkerClient(worker[0]) as other:
        assert other.wait_connected(60)
        first = client.generate(request(client, id="same", stream=True), timeout=60)
        second = other.generate(request(other, id="same", text="world", stream=True), timeout=60)
        assert "".join(c.text for c in first) != "".join(c.text for c in second)


def test_an_id_in_use_is_refused(worker, client):
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(f"ipc://{worker[0]}")
    dealer.setsockopt(zmq.RCVTIMEO, 60_000)
    message = msgpack.packb({"op": "generate", "id": "x", "text": "hello", **SLOW})
    dealer.send(message)
    dealer.send(message)
    answer = msgpack.unpackb(dealer.recv())
    assert answer["message"] == "id: 'x' is in use by a request that is still running"
    dealer.close(linger=0)


def start_process(path, delay="0.005"):
    process = subprocess.Popen([sys.executable, str(TOY_WORKER), str(path), delay])
    wait_for_worker(path, 60)
    return process


def test_death_is_noticed_and_a_new_worker_is_found(tmp_path):
    path = tmp_path / "w.sock"
    process = start_process(path)
    with WorkerClient(path) as client:
        assert client.wait_connected(60)
        chunks = client.generate(request(client, stream=True, **SLOW), timeout=60)
        next(chunks)
        process.kill()
        with pytest.raises(WorkerError) as failed:
            list(chunks)
        assert failed.value.code == "service_unavailable"
        process.wait()
        with pytest.raises(WorkerError, match="restarting or not running"):
            client.complete(request(client))
        process = start_process(path)
        assert client.wait_connected(60)
        assert client.complete(request(client), timeout=60).finish_reason == "length"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not path.exists()


def test_the_worker_dies_with_its_parent(tmp_path):
    path = tmp_path / "w.sock"
    code = (
        "import subprocess, sys, time\n"
        f"print(subprocess.Popen([sys.executable, {str(TOY_WORKER)!r}, {str(path)!r}]).pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for_worker(path, 60)
    parent.kill()
    parent.wait()

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
        except OSError:
            return True

    wait_until(gone)


def test_a_missing_bundle_is_reported(tmp_path, capsys):
    assert main(["--bundle", str(tmp_path / "none"), "--socket", str(tmp_path / "s")]) == 2
    assert "none" in capsys.readouterr().err
