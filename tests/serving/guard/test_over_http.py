"""HTTP through the guard: what passes and how, what is refused with which status, and clients that go away."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpx
import pytest

from redraft.errors import Code, RequestError
from redraft.serving.guard import over_http
from redraft.serving.guard.limits import MAX_BODIES_BYTES, MAX_BODY_BYTES, MAX_CHUNKS, MAX_HEADER_BYTES, MAX_HEADERS
from redraft.worker.protocol import STOPPING
from tests.serving.client_side import HTTP, MANY_CHUNKS, chunk_senders

GENERATE = "/v2/models/ensemble/generate"
INFER = "/v2/models/ensemble/infer"
MODELS_CODES = (
    *(Code.INVALID_REQUEST, Code.CONTEXT_LENGTH, Code.OVERLOADED, Code.CANCELLED),
    *(Code.INTERNAL, Code.UNAVAILABLE, Code.DEADLINE),
)
"""Of errors that come from models and the worker."""
HEADER = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\n".encode()


def post(guard, body: Any, path: str = GENERATE, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    return HTTP.post(f"{guard.url}{path}", content=content, timeout=30, **options)


@contextmanager
def stopped(guard) -> Iterator[None]:
    """The supervisor has begun to stop the service."""
    sign = guard.folder / STOPPING
    sign.touch()
    try:
        yield
    finally:
        sign.unlink()


def raw(guard, data: bytes) -> bytes:
    """All that comes back, to the connection's end."""
    with socket.create_connection(("127.0.0.1", guard.http_port), timeout=30) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_request_passes_with_its_numbers_as_they_are(guard):
    """Written anew; a seed beyond 2**53 and NaN, which a model refuses by name, included."""
    body = b'{"text_input": "a \xc3\xa9 \\ud83d\\ude00", "seed": 18446744073709551615, "t": [0.1, -0.0, NaN, 1e400]}'
    answer = post(guard, body, headers={"Authorization": "secret", "Content-Type": "text/plain"})
    assert answer.status_code == 200
    ((path, headers, passed),) = guard.requests
    assert path == f"POST {GENERATE}"
    assert {name.lower() for name in headers} == {"host", "content-type", "content-length"}
    assert headers["Content-Type"] == "application/json"
    assert passed.decode() == '{"text_input":"a é 😀","seed":18446744073709551615,"t":[0.1,-0.0,NaN,Infinity]}'


def test_of_a_repeated_key_the_checked_one_passes(guard):
    """Triton would read the first."""
    bad = '[{"name": "text_output", "parameters": {"classification": 1}}]'
    assert post(guard, f'{{"inputs": [], "outputs": {bad}, "outputs": []}}'.encode(), INFER).status_code == 200
    assert b"classification" not in guard.requests[-1][2]
    assert post(guard, f'{{"inputs": [], "outputs": [], "outputs": {bad}}}'.encode(), INFER).status_code == 400


def test_tensors_in_binary_pass_as_they_are(guard):
    text, tail = b'{"inputs": [ ]}', b"\xff\x00{"
    headers = {"Inference-Header-Content-Length": str(len(text))}
    assert post(guard, text + tail, INFER, headers=headers).status_code == 200
    ((_, headers, passed),) = guard.requests
    assert passed == b'{"inputs":[]}' + tail
    assert headers["Inference-Header-Content-Length"] == str(len(passed) - len(tail))
    for length in ("99", "-1", "x", "9" * 5000):
        refused = post(guard, text, INFER, headers={"Inference-Header-Content-Length": length})
        assert (refused.status_code, "expected 0 to 15" in refused.text) == (400, True), length


@pytest.mark.parametrize(
    "path",
    ["/v2", "/v2/", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/models/tensorrt_llm",
     "/v2/models/ensemble/config", "/v2/models/ensemble/versions/1/ready", "/v2/models/ensemble/stats"],
)  # fmt: skip
def test_what_runs_nothing_passes_without_a_body(guard, path):
    assert HTTP.request("GET", f"{guard.url}{path}", content=b"a=b").status_code == 200
    ((asked, _, body),) = guard.requests
    assert (asked, body) == (f"GET {path.rstrip('/')}", b"")


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/", 404, "unknown path '/': expected one such as /v2/models/ensemble/generate"),
        ("POST", "/v1/chat/completions", 404, "/v1 has a port of its own, which `redraft status` names"),
        ("GET", "/v2/models/engine_worker/ready", 404, "unknown model 'engine_worker': expected one of ensemble"),
        ("POST", "/v2/models/ensemble/versions/2/infer", 404, "unknown version '2' of ensemble: expected 1"),
        ("POST", "/v2/models/ensemble/generate/more", 404, "unknown path"),
        ("GET", "/v2/models/%65nsemble", 404, "unknown model '%65nsemble'"),
        ("GET", GENERATE, 405, "expected POST"),
        ("POST", "/v2/health/live", 405, "expected GET"),
        ("DELETE", "/v2", 405, "DELETE is not for this path"),
        ("POST", "/v2/repository/models/ensemble/unload", 403, "repository is closed"),
        ("POST", "/v2/repository/index", 403, "repository is closed"),
        ("POST", "/v2/systemsharedmemory/region/x/register", 403, "systemsharedmemory is closed"),
        ("GET", "/v2/cudasharedmemory/status", 403, "cudasharedmemory is closed"),
        ("POST", "/v2/models/ensemble/trace/setting", 403, "trace is closed"),
        ("POST", "/v2/logging", 403, "logging is closed"),
    ],
)
def test_other_paths_are_refused_by_name(guard, method, path, status, message):
    answer = HTTP.request(method, f"{guard.url}{path}")
    assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text
    assert not guard.requests


def test_of_the_metrics_only_themselves_pass(guard):
    """Their server parses a form's body of any path, and a large one ends it."""
    url = f"http://127.0.0.1:{guard.metrics_port}"
    assert HTTP.get(f"{url}/metrics/?a=b").status_code == 200
    assert HTTP.request("GET", f"{url}/metrics", content=b"a=b").status_code == 200
    assert [(path, body) for path, _, body in guard.requests] == [("GET /metrics", b"")] * 2
    assert HTTP.post(f"{url}/metrics", data={"a": "b"}).status_code == 405
    said = {"error": "unknown path '/v2/health/ready': expected /metrics", "code": "not_found"}
    assert HTTP.get(f"{url}/v2/health/ready").json() == said
    assert HTTP.get(f"{url}/metrics", headers={"Origin": "https://a.example"}).status_code == 403
    assert len(guard.requests) == 2


BODIES = [
    (b"", "the body is empty"),
    (b" ", "the body is empty"),
    (b"[]", "not a JSON object but list"),
    (b'{"a": 1', "not valid JSON: EOF"),
    (b'{"a": 1} x', "not valid JSON: trailing characters"),
    (b'{"a": "\\ud800"}', "not valid JSON: half of a surrogate pair"),
    (b'{"a": "\xff"}', "not valid JSON: expected UTF-8 text, got invalid start byte at byte 7"),
    (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON: number out of range"),
    (b'{"a": ' + b"[" * 201 + b"]" * 201 + b"}", "not valid JSON: recursion limit"),
    (b'{"a": ' * 500_000, "not valid JSON: recursion limit"),
]


@pytest.mark.parametrize(("body", "message"), BODIES, ids=range(len(BODIES)))
def test_malformed_bodies_are_a_400(guard, body, message):
    """Triton answers some of them with 500, and deep nesting ends it."""
    answer = post(guard, body)
    assert (answer.status_code, message in answer.json()["error"]) == (400, True), answer.text
    assert not guard.requests


MANY = dict.fromkeys(map(str, range(129)), 1)


def tensor(**fields: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "INT32", "data": [1]} | fields]}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"inputs": 5}, 400, "inputs: expected a list of objects"),
        ({"outputs": ["a"]}, 400, "outputs: expected a list of objects"),
        ({"outputs": [{}] * 65}, 413, "outputs: expected at most 64, got 65"),
        ({"parameters": 5}, 400, "parameters: expected an object"),
        (
            {"parameters": MANY},
            413,
            "parameters: expected at most 128 fields, got 129",
        ),
        ({"parameters": {"a\0": 1}}, 400, "parameters: the field 'a\\x00': expected a text without NUL characters"),
        ({"id": "a\0b"}, 400, "id 'a\\x00b': expected a text without NUL"),
        ({"id": "a" * 257}, 413, "id: expected at most 256 characters, got 257"),
        (MANY, 413, "the body: expected at most 128 fields, got 129"),
        (tensor(**MANY), 413, "inputs: expected at most 128 fields, got 133"),
        (tensor(name="x\0"), 400, "inputs: name 'x\\x00': expected a text without NUL"),
        (tensor(name="x" * 257), 413, "inputs: name: expected at most 256 characters"),
        (tensor(datatype="x" * 257), 413, "inputs 'x': datatype: expected at most 256 characters"),
        (tensor(data=[[""] * 2049] * 2), 413, "inputs 'x': data: expected at most 4096 items that are no numbers"),
        (tensor(data=[2**31]), 400, "inputs 'x': data: expected integers of at most 32 bits"),
        (tensor(datatype="BYTES", shape=[1, 4097]), 413, "input 'x': shape: expected at most 4096 elements"),
        (tensor(parameters=[]), 400, "inputs 'x': parameters: expected an object"),
        (tensor(parameters={"shared_memory_region": "r"}), 400, "'x': the parameter 'shared_memory_region' is not"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 1}}]}, 400, "'y': the parameter 'classification'"),
        (tensor(shape=[-1]), 400, "input 'x': shape: expected no negative size"),
        (tensor(shape=["1"]), 400, "inputs 'x': shape: expected a list of integers"),
        (tensor(shape=[0, 2**62, 4]), 413, "input 'x': shape: expected at most"),
        (tensor(shape=[1] * 17), 413, "input 'x': shape: expected at most"),
    ],
)
def test_tensors_that_triton_must_not_see(guard, body, status, message):
    answer = post(guard, body, INFER)
    assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text
    assert not guard.requests


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        (dict.fromkeys(map(str, range(120_000)), 1), 413, "the body: expected at most 128 fields, got 120001"),
        ({"parameters": MANY}, 413, "parameters: expected at most 128 fields, got 129"),
        ({"parameters": None}, 400, "parameters: expected an object"),
        ({"parameters": [{}]}, 400, "parameters: expected an object"),
        ({"a\0b": 1}, 400, "the body: the field 'a\\x00b': expected a text without NUL characters"),
        ({"parameters": {"\0": 1}}, 400, "parameters: the field '\\x00': expected a text without NUL characters"),
        ({"a" * 257: 1}, 413, "the body: the field: expected at most 256 characters, got 257"),
        ({"id": "\0"}, 400, "id '\\x00': expected a text without NUL"),
        ({"max_tokens": 2**32 + 4}, 400, "max_tokens: expected integers of at most 32 bits"),
        ({"input_ids": [[5, -(2**31) - 1]]}, 400, "input_ids: expected integers of at most 32 bits"),
        ({"bad_words": [""] * 4097}, 413, "bad_words: expected at most 4096 items that are no numbers"),
        ({"bad_words": [[[]] * 65] * 64}, 413, "bad_words: expected at most 4096 items that are no numbers"),
        ({"parameters": {"bad_words": [None] * 4097}}, 413, "bad_words: expected at most 4096 items"),
    ],
)  # fmt: skip
def test_fields_that_triton_must_not_see(guard, fields, status, message):
    """It takes time that grows with the square of their number, and answers what confuses it with 500."""
    answer = post(guard, {"text_input": "x"} | fields)
    assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text
    assert not guard.requests


def test_a_prompt_may_be_long(guard):
    """As token ids too, and a text may hold what a name may not."""
    body = {"seed": 2**64 - 1, "input_ids": [[2**31 - 1] * 50_000], "text_input": "a\0b", "bad_words": ["a"] * 1024}
    assert post(guard, body).status_code == 200


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (HEADER + b"Content-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1), 413, b"the body is too large"),
        (HEADER + b"Transfer-Encoding: chunked\r\n\r\n500000\r\n" + b"a" * 0x500000, 413, b"the body is too large"),
        (HEADER + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * (MAX_CHUNKS + 1), 413, b"too many chunks"),
        (HEADER + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, b""),
        (HEADER + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\nzz\r\n", 400, b""),
        (HEADER + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}", 400, b""),
        (HEADER + b"Content-Length: -1\r\n\r\n", 400, b""),
        (HEADER + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 415, b"identity, got"),
        (HEADER + b"A: " + b"a" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n", 400, b""),
        (HEADER + b"A: a\r\n" * MAX_HEADERS + b"\r\n", 400, b""),
        (b"GET /" + b"a" * (MAX_HEADER_BYTES + 1) + b" HTTP/1.1\r\n\r\n", 400, b""),
        (b"\x16\x03\x01\x00\r\n\r\n", 400, b""),
    ],
)  # fmt: skip
def test_malformed_http(guard, data, status, message):
    answer = raw(guard, data)
    assert (int(answer.split()[1]), message in answer) == (status, True), answer
    assert not guard.requests


@pytest.mark.parametrize("path", [b"POST /v9", b"GET /v2/health/live"])
def test_a_body_that_is_not_read_is_dropped_unparsed(guard, path):
    """What is malformed included. Its client gets the answer, and is then cut off."""
    with socket.create_connection(("127.0.0.1", guard.http_port), timeout=30) as connection:
        connection.sendall(path + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b"Connection: close" in answer
        assert answer.endswith(b"}")
        connection.sendall(b"zz\r\n")
        while True:
            try:
                connection.sendall(MANY_CHUNKS)
            except ConnectionError:
                break


def test_bodies_in_chunks_of_a_byte_leave_streams_their_pace(guard):
    """From four connections at a time, refused or not: their bodies are not parsed to their ends."""
    evil = HEADER + b"Origin: https://evil.example\r\n"

    def pieces() -> int:
        """Pieces of a stream that come in two seconds, of 100 a second."""
        stream = {"method": "POST", "url": f"{guard.url}{GENERATE}_stream", "json": {"text_input": "wait"}}
        with HTTP.stream(**stream, timeout=30) as answer:
            over = time.monotonic() + 2
            return sum(1 for _ in itertools.takewhile(lambda _: time.monotonic() < over, answer.iter_raw()))

    alone = pieces()
    with chunk_senders(guard.http_port, HEADER, evil, HEADER, evil) as sent:
        assert pieces() > alone / 4
    assert {*sent} == {HEADER, evil}


def test_a_slow_body_is_given_up(guard, monkeypatch):
    monkeypatch.setattr(over_http, "BODY_S", 0.2)
    answer = raw(guard, HEADER + b"Content-Length: 9\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within" in answer


def test_a_client_that_waits_to_be_told_to_go_on(guard):
    """As curl does with large bodies."""
    with socket.create_connection(("127.0.0.1", guard.http_port), timeout=30) as connection:
        connection.sendall(HEADER + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"{}")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")


ERRORS = [
    *((f"[{code}] a text (1 s)", status, code) for code in MODELS_CODES for status in (200, 400, 500)),
    ("Unable to parse 'data': attempt to access JSON non-string as string", 500, Code.INVALID_REQUEST),
    (
        "failed to parse the request JSON buffer: Number too big to be stored in double",
        500,
        Code.INVALID_REQUEST,
    ),
    ("Failed to increase the shared memory pool size", 500, Code.TOO_LARGE),
    ("generate expects model to produce exactly 1 response", 200, Code.INVALID_REQUEST),
    ("Stub process 'ensemble_0_0' is not healthy.", 500, Code.INTERNAL),
    ("HTTP end point doesn't support models with decoupled transaction policy", 501, Code.NOT_IMPLEMENTED),
]


@pytest.mark.parametrize(("text", "status", "code"), ERRORS)
def test_an_error_has_the_status_of_its_code(guard, text, status, code):
    """One that a stream begins with too, which comes as an event with status 400, or 200."""
    body = json.dumps({"error": text}, separators=(",", ":"))
    answers = [post(guard, {"text_input": {"status": status, "body": body}})]
    event = {"body": f"data: {body}\n\n", "type": "text/event-stream", "status": status}
    answers.append(post(guard, {"text_input": event}, f"{GENERATE}_stream"))
    for answer in answers:
        assert (answer.status_code, answer.headers.get("retry-after")) == (code.http, code.headers.get("Retry-After"))
        assert answer.json() == {"error": text.removeprefix(f"[{code}] "), "code": code}


def test_an_error_in_a_stream_has_its_code_beside_the_text(guard):
    body = 'data: {"text_output":"a"}\n\ndata: {"error":"[deadline_exceeded] late"}\n\n'
    event = {"body": body, "type": "text/event-stream", "status": 200}
    first, last, _ = post(guard, {"text_input": event}, f"{GENERATE}_stream").text.split("\n\n")
    assert first == 'data: {"text_output":"a"}'
    assert json.loads(last.removeprefix("data: ")) == {"error": "late", "code": "deadline_exceeded"}


def test_a_stream_passes_as_it_is(guard):
    answer = post(guard, {"text_input": "x"}, f"{GENERATE}_stream")
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.text == 'data: {"text_output":"a"}\n\ndata: {"text_output":"b"}\n\n'


@pytest.mark.parametrize("stopping", [False, True])
def test_a_server_that_dies(guard, stopping):
    """Before its first byte, and in a stream, of which only whole events are passed on."""
    said = "Triton server is shutting down" if stopping else "Triton server is restarting"
    with stopped(guard) if stopping else nullcontext():
        answer = post(guard, {"text_input": "die"})
        stream = post(guard, {"text_input": "die"}, f"{GENERATE}_stream")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert said in answer.json()["error"]
    first, last, end = stream.text.split("\n\n")
    assert json.loads(first.removeprefix("data: ")) == {"text_output": "a"}
    assert said in json.loads(last.removeprefix("data: "))["error"]
    assert end == ""


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:8000", "null", ""])
def test_a_web_page_is_refused(guard, origin):
    """It can send such a request to a service on the machine of who reads it."""
    headers = {"Origin": origin, "Content-Type": "text/plain"}
    answer = HTTP.post(f"{guard.url}{GENERATE}", content=b'{"text_input": "hi"}', headers=headers)
    assert (answer.status_code, guard.requests) == (403, [])
    assert answer.json()["error"].endswith("is a web page's: --allow-host accepts its site")


@pytest.mark.parametrize(("sites", "passes"), [(["a.example"], True), (["*"], True), (["example"], False)])
def test_a_site_that_was_named_may_use_it(sites, passes):
    with nullcontext() if passes else pytest.raises(RequestError):
        over_http._check_origin(["https://A.example:8443"], sites)


@pytest.mark.parametrize(
    ("path", "told"), [(GENERATE, "hang"), (f"{GENERATE}_stream", "wait"), (f"{GENERATE}_stream", "flood")]
)
def test_a_client_that_goes_away_is_noticed_at_once(guard, path, told, monkeypatch):
    """And soon one that stays, but does not read what floods it."""
    monkeypatch.setattr(over_http, "UNREAD_S", 0.2)
    with socket.create_connection(("127.0.0.1", guard.http_port), timeout=30) as connection:
        body = json.dumps({"text_input": told}).encode()
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        while not guard.requests:
            assert not guard.ended.wait(0.01)
        assert told != "flood" or guard.ended.wait(10)
    assert guard.ended.wait(10)


def test_bodies_beyond_what_all_may_have_are_refused(guard):
    with guard.room.body() as take:
        take(MAX_BODIES_BYTES - 5)
        answer = post(guard, {"text_input": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"].startswith("overloaded: bodies of 67108864 bytes are held")
    assert post(guard, {"text_input": "x"}).status_code == 200


def test_too_many_requests_are_told_to_come_back(guard, monkeypatch):
    monkeypatch.setattr(over_http, "MAX_REQUESTS", 0)
    answer = post(guard, {"text_input": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert HTTP.get(f"{guard.url}/v2/health/live", timeout=30).status_code == 200, "who watches it must not end it"
