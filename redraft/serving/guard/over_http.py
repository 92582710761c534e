"""Triton's HTTP protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from redraft.errors import Code, RequestError
from redraft.request import clipped
from redraft.serving.guard.answers import failure
from redraft.serving.guard.checks import check_model, checked_json
from redraft.serving.guard.limits import (
    BODY_S,
    END_S,
    IDLE_S,
    LINGER_S,
    MAX_BODY_BYTES,
    MAX_CHUNKS,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_REQUESTS,
    METADATA_S,
    UNREAD_S,
    Room,
)
from redraft.serving.guard.refusal import triton_away

JSON_LENGTH = "Inference-Header-Content-Length"
"""Header with the length of a body's JSON, which tensors in binary follow."""
EVERY_SITE = "*"
_EVENT, _EVENT_END, _ERROR = b"data: ", b"\n\n", b'{"error":'
_FIXED = ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats")
_MODEL = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?:/(?P<action>[^/]+))?")
_ASKED, _RUN = ("", "config", "ready", "stats"), ("infer", "generate", "generate_stream")
_CLOSED = re.compile(r"/v2/(?:models/[^/]+/)?(repository|systemsharedmemory|cudasharedmemory|trace|logging)(?:/.*)?")
_SERVED = "expected one such as /v2/models/ensemble/generate; /v1 has a port of its own, which `redraft status` names"
_PASSED_BACK = ("Content-Type", JSON_LENGTH)

log = logging.getLogger("redraft.guard")


Route = Callable[[str, str], tuple[str, str]]
"""Returns the path at Triton for a request's method and path and, for a model's, what is asked of it. Raises
RequestError for what is not served."""


class HttpGuard:
    """Passes requests on to the Triton server at a Unix socket, those of web pages only from `sites`.

    Where there is `more`, it is called in a thread, and its text follows that of Triton's answers.
    """

    def __init__(
        self,
        triton: aiohttp.ClientSession,
        socket: Path,
        room: Room,
        sites: Collection[str],
        route: Route,
        more: Callable[[], bytes] | None = None,
    ):
        self._triton, self._socket, self._room, self._sites, self._route = triton, socket, room, sites, route
        self._more = more
        self._requests = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. A body that has not come to its end by then ends the connection."""
        response = await self._answer(request)
        if not request.content.is_eof():
            await _end(request, response)
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            _check_origin(request.headers.getall("Origin", ()), self._sites)
            path, action = self._route(request.method, request.rel_url.raw_path)
            if action not in _RUN:
                answer = await self._ask(path)
                if self._more is not None and isinstance(answer.body, bytes):
                    answer.body += await asyncio.to_thread(self._more)
                return answer
            if self._requests >= MAX_REQUESTS:
                raise RequestError(
                    f"overloaded: {MAX_REQUESTS} requests are in flight: try again later", Code.OVERLOADED
                )
            self._requests += 1
            try:
                with self._room.body() as take:
                    return await self._run(request, path, action, await _read(request, take))
            finally:
                self._requests -= 1
        except RequestError as error:
            return _refused(error)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # its text may hold a part of a prompt
            log.error("%s at line %s", type(error).__name__, error.__traceback__ and error.__traceback__.tb_lineno)
            return _refused(RequestError("internal error: the guard's log has the cause", Code.INTERNAL))

    async def _ask(self, path: str) -> web.Response:
        try:
            async with asyncio.timeout(METADATA_S), self._triton.get(path) as answer:
                return await self._whole(answer)
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise triton_away(self._socket) from None

    async def _run(self, request: web.BaseRequest, path: str, action: str, body: bytes) -> web.StreamResponse:
        """Run a request for as long as its client waits: where that goes, aiohttp cancels this."""
        headers = {"Content-Type": "application/json"}
        if action == "infer" and (length := request.headers.get(JSON_LENGTH)) is not None:
            if not (length.isascii() and length.isdecimal() and len(length) < 9 and int(length) <= len(body)):
                raise RequestError(f"{JSON_LENGTH}: expected 0 to {len(body)}, the body's length")
            text, rest = body[: int(length)], body[int(length) :]
            text = checked_json(text, infer=True)
            body, headers[JSON_LENGTH] = text + rest, str(len(text))
        else:
            body = checked_json(body, infer=action == "infer")
        try:
            answer = await self._triton.post(path, data=body, headers=headers)
        except (aiohttp.ClientError, OSError):
            raise triton_away(self._socket) from None
        async with answer:
            if answer.content_type == "text/event-stream" and answer.status == 200:
                return await self._stream(request, answer)
            return await self._whole(answer)

    async def _whole(self, answer: aiohttp.ClientResponse) -> web.Response:
        """Triton's answer, its status set right where it is an error. It has one with status 200 for several
        responses."""
        try:
            body = await answer.read()
        except (aiohttp.ClientError, OSError):
            raise triton_away(self._socket) from None
        if text := _error(body):
            raise failure(text, answer.status)
        headers = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
        return web.Response(body=body, status=answer.status, headers=headers)

    async def _stream(self, request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass events on as they come. A stream that begins with an error becomes an answer with a status."""
        begun = b""
        try:
            while _EVENT_END not in begun and (piece := await answer.content.readany()):
                begun += piece
        except (aiohttp.ClientError, OSError):
            raise triton_away(self._socket) from None
        if text := _error(begun):
            raise failure(text, answer.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        async for events in self._events(answer, begun):
            await _while_read(request, response.write(events), len(events))
        await _while_read(request, response.write_eof())
        return response

    async def _events(self, answer: aiohttp.ClientResponse, begun: bytes) -> AsyncIterator[bytes]:
        """Whole events of a stream that has begun with these bytes. It ends with an error event where Triton goes away,
        in the middle of an event too."""
        rest = begun
        try:
            while True:
                events, end, rest = rest.rpartition(_EVENT_END)
                if end:
                    yield _with_codes(events + end)
                if not (piece := await answer.content.readany()):
                    break
                rest += piece
        except (aiohttp.ClientError, OSError):
            rest = _error_event(triton_away(self._socket))
        if rest:
            yield rest


def _check_origin(origins: Iterable[str], sites: Collection[str]) -> None:
    """Refuse a request of a web page. A browser on the same machine reaches this server, and lets pages of any site
    send to it; only they have an Origin."""
    for origin in origins:
        site = re.sub(r"^\w+://|:\d+$", "", origin.lower())
        if not {site, EVERY_SITE} & {*sites}:
            raise RequestError(
                f"Origin {clipped(origin)!r} is a web page's: --allow-host accepts its site", Code.ORIGIN_NOT_ALLOWED
            )


def metrics_route(method: str, path: str) -> tuple[str, str]:
    """The `Route` of the port with Triton's metrics: that server reads a body of any path, as the other does."""
    if path.rstrip("/") != "/metrics":
        raise RequestError(f"unknown path {clipped(path, 100)!r}: expected /metrics", Code.NOT_FOUND)
    _check_method(method, "GET")
    return "http://triton/metrics", ""


def models_route(method: str, path: str) -> tuple[str, str]:
    """The `Route` of the models, health and statistics."""
    if (closed := _CLOSED.fullmatch(path)) and closed[1]:
        raise RequestError(f"{closed[1]} is closed: this server takes requests for its models only", Code.CLOSED)
    fixed = path.rstrip("/")
    if fixed in _FIXED:
        wanted, action = "GET", ""
    else:
        match = _MODEL.fullmatch(path)
        action = (match["action"] or "") if match else ""
        if match is None or action not in (*_ASKED, *_RUN):
            raise RequestError(f"unknown path {clipped(path, 100)!r}: {_SERVED}", Code.NOT_FOUND)
        check_model(match["model"], match["version"] or "")
        fixed, wanted = path, "POST" if action in _RUN else "GET"
    _check_method(method, wanted)
    return f"http://triton{fixed}", action


def _check_method(method: str, wanted: str) -> None:
    if method != wanted:
        raise RequestError(f"{clipped(method)} is not for this path: expected {wanted}", Code.METHOD_NOT_ALLOWED)


async def _read(request: web.BaseRequest, take: Callable[[int], None]) -> bytes:
    """A request's body; `take` is told how long each of its parts is. Raises RequestError."""
    if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise RequestError(
            f"Content-Encoding: expected identity, got {clipped(encoding)!r}", Code.UNSUPPORTED_MEDIA_TYPE
        )
    too_large = RequestError(f"the body is too large: expected at most {MAX_BODY_BYTES} bytes", Code.TOO_LARGE)
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise too_large
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer has been sent
    parts, size, chunks = [], 0, 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part, chunk_ended in request.content.iter_chunks():
                take(len(part))
                parts.append(part)
                size += len(part)
                chunks += chunk_ended
                if size > MAX_BODY_BYTES:
                    raise too_large
                if chunks > MAX_CHUNKS:
                    raise RequestError(f"the body has too many chunks: expected at most {MAX_CHUNKS}", Code.TOO_LARGE)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {BODY_S:.0f} s", Code.BODY_TIMEOUT) from None
    except (HttpProcessingError, web.PayloadAccessError, web.RequestPayloadError):
        raise RequestError("the body's chunks are malformed, or it ended early") from None
    return b"".join(parts)


async def _while_read(request: web.BaseRequest, writing: Awaitable[None], size: int = 0) -> None:
    """Write a part of a stream, of so many bytes at least. Where the client reads nothing for UNREAD_S, the connection
    ends, and aiohttp cancels this."""
    loop, transport = asyncio.get_running_loop(), request.transport
    if transport is None:
        return await writing
    limit: asyncio.TimerHandle

    def look(left: int) -> None:
        nonlocal limit
        if (unread := transport.get_write_buffer_size()) < left:
            limit = loop.call_later(UNREAD_S, look, unread)
        else:
            transport.abort()

    limit = loop.call_later(UNREAD_S, look, transport.get_write_buffer_size() + size)
    try:
        await writing
    finally:
        limit.cancel()


def _error(body: bytes) -> str:
    """The text of an error of Triton, as JSON or as an event, "" for anything else."""
    body = body.removeprefix(_EVENT)
    if not body.startswith(_ERROR):
        return ""
    text = json.loads(body.partition(_EVENT_END)[0])["error"]
    return text if isinstance(text, str) else ""


def _refused(error: RequestError) -> web.Response:
    """The answer to a request without a result."""
    return web.json_response(_body(error), status=error.code.http, headers=error.code.headers)


def _body(error: RequestError) -> dict[str, str]:
    """An error as Triton's HTTP protocol has it, and its code."""
    return {"error": error.message, "code": error.code}


def _error_event(error: RequestError) -> bytes:
    return _EVENT + json.dumps(_body(error)).encode() + _EVENT_END


def _with_codes(events: bytes) -> bytes:
    """Whole events, in which errors have their code beside the text instead of in it."""
    if _EVENT + _ERROR not in events:  # as good as always: the events stay as they came
        return events
    pieces = events.removesuffix(_EVENT_END).split(_EVENT_END)
    texts = map(_error, pieces)
    return b"".join(
        _error_event(failure(text, 200)) if text else piece + _EVENT_END
        for text, piece in zip(texts, pieces, strict=True)
    )


async def _end(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Send the answer, and end the connection without parsing the rest of the body: it may be endless chunks."""
    response.force_close()
    await response.prepare(request)
    await response.write_eof()
    if transport := request.transport:
        transport.write_eof()
        transport.set_protocol(_Dropping(transport.get_protocol()))
        transport.resume_reading()


class _Dropping(asyncio.Protocol):
    """What becomes of a connection for LINGER_S: all that comes is dropped. `parser` is the protocol that it had."""

    def __init__(self, parser: asyncio.BaseProtocol):
        self._parser = parser

    def connection_lost(self, exc: Exception | None) -> None:
        self._parser.connection_lost(exc)


@asynccontextmanager
async def listening(
    address: str,
    port: int,
    socket: Path,
    room: Room,
    sites: Collection[str] = (),
    route: Route = models_route,
    more: Callable[[], bytes] | None = None,
) -> AsyncIterator[None]:
    """Pass requests on to Triton's socket within the context; `more` as in `HttpGuard`."""
    async with aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(socket), limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
    ) as triton:
        server = web.Server(
            HttpGuard(triton, socket, room, sites, route, more).handle,
            handler_cancellation=True,
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            auto_decompress=False,
            access_log=None,
        )
        runner = web.ServerRunner(server, shutdown_timeout=END_S)
        await runner.setup()
        await web.TCPSite(runner, address, port).start()
        try:
            yield
        finally:
            await runner.cleanup()
