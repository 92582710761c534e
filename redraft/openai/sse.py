"""Bodies on the wire: JSON answers and server-sent events, and requests that end when their client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
END = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection; nobody waits for an answer."""


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(to_json(body), status, headers, "application/json")


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + to_json(data) + b"\n\n"


class EventStream(StreamingResponse):
    """An answer of server-sent events, which no proxy is to hold back. `on_end` is called when it has ended, be it that
    the client went away."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def attended(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises ClientGone then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for waiting in (task, gone):
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await waiting


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
