"""A client's connection to the front end, and what its requests may cost before anything of them is checked."""

from __future__ import annotations

import asyncio

import httptools
from pydantic_core import to_json
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from redraft.errors import Code
from redraft.openai.errors import ApiError
from redraft.serving.guard.limits import MAX_CHUNKS, MAX_HEADERS, UNREAD_S

MAX_HEAD_BYTES = 2**16
"""A request's line and headers, or the trailers after a body's last chunk."""
PIECE_BYTES = 2**14
"""What the parser gets at a time, so that it is stopped soon after MAX_HEAD_BYTES."""
CONNECT = b"CONNECT"


class Connection(HttpToolsProtocol):
    """A connection that is closed where a request has too many headers or chunks, no complete request header arrives in
    time, or its client does not read.

    The parser, which is Node's, has no limits of its own. Uvicorn's time limit begins after a request only, and ends
    with the first byte of the next, or of a body that was answered before it came. For a client that does not read it
    has none.
    """

    _running: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the last one that was sent, which may wait for it."""
    _unread: asyncio.TimerHandle | None = None
    _head_bytes = 0
    """Bytes since a part of a body, or the end of a request."""
    _fields = 0
    """The request's headers and trailers."""
    _chunks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_at(self.loop.time() + self.timeout_keep_alive)

    def data_received(self, data: bytes) -> None:
        timer = self.timeout_keep_alive_task
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        while rest and not self.transport.is_closing():
            rest = rest[self._parse(rest[:PIECE_BYTES]) :]
        if timer is not None and (self.cycle is None or self.cycle.response_complete):
            self._close_at(timer.when())

    def _parse(self, piece: memoryview) -> int:
        """Have the parser read a piece, or refuse it. Returns how much of it has been read."""
        size = len(piece)
        try:
            self._head_bytes += size
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as pause:
                (size,) = pause.args
                self._read_again()
            if self._head_bytes > MAX_HEAD_BYTES:
                raise ApiError(
                    f"the headers are too large: expected at most {MAX_HEAD_BYTES} bytes", code=Code.HEADERS_TOO_LARGE
                )
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, ApiError) else ApiError(f"malformed HTTP: {error}"))
        except ApiError as error:
            self._refuse(error)
        return size

    def _read_again(self) -> None:
        """Read a header again without its offer of another protocol, such as HTTP/2, which is not taken. Java's client
        makes it with every request, and a parser that has seen it leaves out the body."""
        line = b" ".join((self.parser.get_method(), self.url, b"HTTP/" + self.parser.get_http_version().encode()))
        fields = [b": ".join(field) for field in self.headers if field[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join([line, *fields, b"", b""]))

    @property
    def _offers_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != CONNECT

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._fields = self._chunks = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > MAX_HEADERS:
            raise ApiError(
                f"the request has too many headers: expected at most {MAX_HEADERS}", code=Code.HEADERS_TOO_LARGE
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._offers_upgrade:
            return
        if self.parser.get_method() == CONNECT:
            raise ApiError("CONNECT is for proxies", code=Code.METHOD_NOT_ALLOWED)
        super().on_headers_complete()
        self.headers = []  # trailers, which are not the request's headers, go where nobody reads them

    def on_chunk_header(self) -> None:
        """Called by the parser at the beginning of each chunk."""
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            raise ApiError(f"the body has too many chunks: expected at most {MAX_CHUNKS}", code=Code.TOO_LARGE)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if not self._offers_upgrade:
            super().on_message_complete()

    def _refuse(self, error: ApiError) -> None:
        """End the connection, with an answer where none has begun."""
        self.logger.warning("refused: %s", error)
        if self._running is None or self._running.response_complete or not self._running.response_started:
            body = to_json(error.body)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn says it to the last request only
            self._running.message_event.set()
        super().connection_lost(exc)

    def _close_at(self, time: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_at(time, self.timeout_keep_alive_handler)

    def _watch(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(UNREAD_S, self._look_again, left)

    def _look_again(self, left: int) -> None:
        """Cut off a client that has read nothing since `left` bytes were left."""
        if self.transport.get_write_buffer_size() < left:
            self._watch()
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
