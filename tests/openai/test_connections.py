"""Clients that go away, a full queue, and a worker that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import tempfile
import time
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from uvicorn.server import ServerState

from redraft.metrics import read
from redraft.openai import connection
from redraft.openai.connection import Connection
from redraft.request import GenerateRequest
from redraft.serving.guard.limits import LINGER_S, MAX_CHUNKS, MAX_HEADERS
from redraft.worker.client import WorkerClient
from redraft.worker.protocol import SHUTTING_DOWN, STARTING, STOPPING
from tests.conftest import wait_until, waits_at_most
from tests.openai.serving import KEYS, MODEL, front_end
from tests.serving.client_side import HTTP, chunk_senders

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
LONG = HELLO | {"ignore_eos": True, "max_tokens": 200, "speculative": False}
"""With the slow server, 20 s and more."""
CHAT = "/v1/chat/completions"


def totals(server) -> dict[str, float]:
    with WorkerClient(server.socket) as client:
        assert client.wait_connected(60)
        status = client.status(metrics=True)
    return read(status.metrics) | {"running": status.running, "waiting": status.waiting}


def test_a_connection_without_a_whole_header_is_closed():
    """Bytes that come one by one do not keep it open, nor do those of a body that is answered before they come. An
    answer may take longer."""

    async def app(scope, receive, send):
        await asyncio.sleep(0.0 if scope["path"] == "/early" else 0.5)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def everything(reader: asyncio.StreamReader) -> bytes:
        """What comes before the connection is closed, or reset by a byte that comes too late."""
        said = b""
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(4096):
                said += piece
        return said

    async def drip(address: tuple[str, int], begin: bytes) -> bytes:
        """What comes back before the connection is closed."""
        reader, writer = await asyncio.open_connection(*address)
        writer.write(begin)
        reading = asyncio.ensure_future(everything(reader))
        for _ in range(100):
            if not reading.done():
                writer.write(b"A")
                await asyncio.sleep(0.05)
        assert reading.done()
        return await reading

    async def talk() -> None:
        config = uvicorn.Config(app, http=Connection, timeout_keep_alive=0.2, lifespan="off", log_config=None)
        config.load()
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: Connection(config, ServerState(), {}), "127.0.0.1", 0) as server:
            address = server.sockets[0].getsockname()
            assert await drip(address, b"GET / HTTP/1.1\r\nA: ") == b""
            early = await drip(address, b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
            assert early.startswith(b"HTTP/1.1 200 OK")
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")

    asyncio.run(talk())


def test_a_client_that_does_not_read_is_cut_off(monkeypatch):
    """Also where the answer is complete. A slow one gets all."""
    monkeypatch.setattr(connection, "UNREAD_S", 0.5)
    piece, pieces, state = 2**20, 20, ServerState()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/whole":
            await send({"type": "http.response.body", "body": bytes(piece * pieces)})
        else:
            for more in reversed(range(pieces)):
                await send({"type": "http.response.body", "body": bytes(piece), "more_body": bool(more)})

    async def size(address: tuple[str, int], path: str, at_once: bool) -> int:
        """Bytes that come, read slowly, or only when the connection has ended."""
        reader, writer = await asyncio.open_connection(*address)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        for begun in () if at_once else (False, True):
            while bool(state.connections) == begun:
                await asyncio.sleep(0.01)
        came = 0
        with contextlib.suppress(ConnectionError):
            while got := await reader.read(piece):
                came += len(got)
                await asyncio.sleep(0.06 * len(got) / piece)
        return came

    async def talk() -> None:
        config = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None)
        config.load()
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: Connection(config, state, {}), "127.0.0.1", 0) as listening:
            address = listening.sockets[0].getsockname()
            assert await size(address, "/whole", at_once=True) > piece * pieces
            for path in ("/whole", "/stream"):
                assert await size(address, path, at_once=False) < piece * pieces

    asyncio.run(talk())


def raw(server, data: bytes) -> bytes:
    """All that comes back, to the connection's end."""
    said = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                said += piece
    return said


HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (CHUNKED + b"Content-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400, "malformed HTTP: Content-Length can't be"),
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400, "malformed HTTP"),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "malformed HTTP"),
        (HEAD + b"Host: localhost\r\nContent-Length: 2\r\n\r\n{}", 400, "several Host headers: expected one"),
        (HEAD + b"Content-Length: -1\r\n\r\n{}", 400, "malformed HTTP"),
        (HEAD + b"Content-Length: 0x2\r\n\r\n{}", 400, "malformed HTTP"),
        (HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400, "malformed HTTP"),
        (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400, "malformed HTTP"),
        (HEAD + b"A: a\r\n folded\r\n\r\n", 400, "malformed HTTP"),
        (HEAD + b"A : a\r\n\r\n", 400, "malformed HTTP"),
        (HEAD + b"A: a\0\r\n\r\n", 400, "malformed HTTP"),
        (HEAD.replace(b"\r\n", b"\n") + b"\n", 400, "malformed HTTP"),
        (CHUNKED + b"\r\nzz\r\n", 400, "malformed HTTP"),
        (CHUNKED + b"\r\n-1\r\n", 400, "malformed HTTP"),
        (CHUNKED + b"\r\n" + b"f" * 17 + b"\r\n", 400, "malformed HTTP"),
        (CHUNKED + b"\r\n1\r\n{zz\r\n", 400, "malformed HTTP"),
        (CHUNKED + b"\r\n" + b"1\r\n \r\n" * (MAX_CHUNKS + 1), 413, "too many chunks: expected at most 4096"),
        (CHUNKED + b"\r\n1;" + b"a" * 100_000, 431, "the headers are too large"),
        (CHUNKED + b"\r\n1\r\n{\r\n0\r\n" + b"A: a\r\n" * MAX_HEADERS, 431, "too many headers"),
        (CHUNKED + b"\r\n1\r\n{\r\n0\r\nA: " + b"a" * 100_000, 431, "the headers are too large"),
        (HEAD + b"A: a\r\n" * MAX_HEADERS, 431, "too many headers: expected at most 64"),
        (HEAD + b"A: " + b"a" * 100_000, 431, "the headers are too large"),
        (HEAD + b"a" * 100_000, 431, "the headers are too large"),
        (b"GET /" + b"a" * 100_000, 431, "the headers are too large"),
        (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 405, "CONNECT is for proxies"),
        (b"GET  HTTP/1.1\r\n\r\n", 400, "malformed HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "malformed HTTP"),
        (b"\x16\x03\x01\x00\r\n\r\n", 400, "malformed HTTP"),
    ],
)  # fmt: skip
def test_malformed_http(server, data, status, message):
    """What a proxy in front might take for another request is refused too, and ends the connection."""
    head, _, body = raw(server, data).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status, head
    assert message in json.loads(body)["error"]["message"]
    assert b"connection: close" in head


HTTP_2 = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
BODY = json.dumps(HELLO | {"max_tokens": 2}).encode()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [1, 150, 10_000])
def test_an_offer_of_http_2_is_not_taken(server, size, chunked):
    """As Java's client makes it with each body. The connection goes on."""
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    length = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % len(BODY)
    last = length + b"Connection: close\r\n\r\n"
    data = HEAD + HTTP_2 + length + b"\r\n" + framed + HEAD + HTTP_2 + length + b"\r\n" + framed + HEAD + last + framed
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
        answers = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b'"chat.completion"') == 3, answers


def test_trailers_are_no_headers(locked_server):
    """They come after what headers decide."""
    trailer = f"Authorization: Bearer {KEYS[0]}\r\nConnection: close\r\n\r\n".encode()
    assert raw(locked_server, CHUNKED + b"\r\n2\r\n{}\r\n0\r\n" + trailer).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "head",
    [CHUNKED.replace(b"localhost", b"evil.example"), HEAD.replace(b"/v1", b"/v9") + b"Content-Length: 9999999\r\n"],
)
def test_a_body_that_is_not_waited_for_ends_the_connection(server, head):
    """Its client gets the answer, and is then cut off although it sends on."""
    began = time.monotonic()
    with waits_at_most(20):
        answer = raw(server, head + b"\r\n" + b"100000\r\n" + b" " * 2**20)
    assert answer.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 404 "))
    assert b"connection: close" in answer
    assert answer.endswith(b"}")
    assert time.monotonic() - began >= LINGER_S


def test_bodies_in_chunks_of_a_byte_leave_streams_their_pace(slow_server):
    """From four connections at a time, refused or not: their bodies are not parsed to their ends."""
    body = HELLO | {"max_tokens": 20, "ignore_eos": True, "speculative": False, "temperature": 0}
    alone = slow_server.post(CHAT, body).json()["choices"][0]["message"]["content"]
    evil = HEAD.replace(b"localhost", b"evil.example")
    # It takes 2 s by itself; a body of a million chunks took h11 20 s.
    with chunk_senders(slow_server.port, HEAD, evil, HEAD, evil) as sent, waits_at_most(20):
        events = slow_server.events(CHAT, body)
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == alone
    assert {*sent} == {HEAD, evil}


@pytest.mark.parametrize("body", [LONG, LONG | {"stream": True}, LONG | {"n": 2}])
def test_a_client_that_goes_away_ends_its_requests(slow_server, body):
    before = totals(slow_server)
    if body.get("stream"):
        with HTTP.stream("POST", f"{slow_server.url}{CHAT}", json=body, timeout=60) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(f"{slow_server.url}{CHAT}", json=body, timeout=httpx.Timeout(10, read=0.3))
    wait_until(lambda: totals(slow_server)["running"] == 0)
    assert totals(slow_server)["generation_tokens_total"] - before["generation_tokens_total"] < 150
    wait_until(lambda: slow_server.metric("redraft_openai_sequences_running") == 0)


def test_a_client_that_goes_away_ends_the_first_of_requests_sent_at_once(slow_server):
    before = totals(slow_server)
    body = json.dumps(LONG | {"stream": True}).encode()
    sent = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    with socket.create_connection(("127.0.0.1", slow_server.port), timeout=30) as connection:
        connection.sendall(2 * sent)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    wait_until(lambda: totals(slow_server)["running"] == 0)
    assert totals(slow_server)["generation_tokens_total"] - before["generation_tokens_total"] < 150


def test_a_malformed_request_does_not_answer_within_the_answer_before_it(slow_server):
    body = json.dumps(LONG | {"stream": True}).encode()
    sent = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    with socket.create_connection(("127.0.0.1", slow_server.port), timeout=30) as connection:
        connection.sendall(sent)
        said = connection.recv(65536)
        connection.sendall(CHUNKED + b"\r\nzz\r\n")
        while piece := connection.recv(65536):
            said += piece
    assert said.count(b"HTTP/1.1 ") == 1
    wait_until(lambda: totals(slow_server)["running"] == 0)


def test_one_that_ends_of_n_leaves_the_others(slow_server):
    body = HELLO | {"n": 2, "max_tokens": 8, "ignore_eos": True}
    answer = slow_server.post(CHAT, body).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2


def test_a_full_queue_is_a_429(slow_server):
    """Two sequences run and two wait; the fifth is told when to come back."""
    with WorkerClient(slow_server.socket) as client:
        assert client.wait_connected(60)
        for _ in range(4):
            long = GenerateRequest(id=client.new_id(), text="a", max_tokens=200, end_id=-1, method="auto_regressive")
            client.submit(long, lambda _: None)
        wait_until(lambda: client.status().waiting == 2)
        for body in (HELLO, HELLO | {"stream": True}, HELLO | {"n": 3}):
            answer = slow_server.post(CHAT, body)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1"), answer.text
            assert answer.json()["error"]["type"] == "rate_limit_error"
        many = slow_server.post(CHAT, HELLO | {"n": 5})
        assert (many.status_code, many.json()["error"]["param"]) == (400, "n"), "it never fits"
        with pytest.raises(openai.RateLimitError):
            slow_server.client().chat.completions.create(model=MODEL, **HELLO)
    wait_until(lambda: totals(slow_server)["running"] == 0)
    assert slow_server.post(CHAT, HELLO | {"max_tokens": 2}).status_code == 200


def test_a_worker_that_dies(bundle):
    with (
        tempfile.TemporaryDirectory(prefix="redraft-test-") as folder,
        front_end(Path(folder), bundle, silence_s=6, delay=0.02) as server,
    ):
        with HTTP.stream("POST", f"{server.url}{CHAT}", json=LONG | {"stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.worker.kill()
            server.worker.wait()
            last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "service_unavailable")
        assert server.health() == 503
        refused = server.post(CHAT, HELLO)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert HTTP.get(f"{server.url}/health", timeout=60).json() == {"status": "restarting"}
        sign = Path(folder) / STOPPING
        sign.touch()
        assert server.post(CHAT, HELLO).json()["error"]["message"] == SHUTTING_DOWN
        assert HTTP.get(f"{server.url}/health", timeout=60).json() == {"status": "shutting down"}
        sign.unlink()
        sign = Path(folder) / STARTING
        sign.touch()
        server.start_worker()
        wait_until(lambda: server.post(CHAT, HELLO | {"max_tokens": 2}).status_code == 200)
        assert server.health() == 503, "the service has yet to answer its own first request"
        assert HTTP.get(f"{server.url}/health", timeout=60).json() == {"status": "starting"}
        sign.unlink()
        wait_until(lambda: server.health() == 200)
        assert server.post(CHAT, HELLO | {"max_tokens": 2}).status_code == 200
        server.worker.send_signal(signal.SIGSTOP)
        assert server.health() == 200, "it may be busy with a long step"
        wait_until(lambda: server.health() == 503)
        server.worker.send_signal(signal.SIGCONT)
        wait_until(lambda: server.health() == 200)
        stream = server.client().chat.completions.create(
            model=MODEL, stream=True, max_tokens=200, extra_body={"ignore_eos": True, "speculative": False}, **HELLO
        )
        next(stream)
        server.worker.kill()
        with pytest.raises(openai.APIError, match="went away"):
            list(stream)
