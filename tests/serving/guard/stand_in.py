"""A stand-in for Triton behind a guard, both in one thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web
from grpc import aio
from tritonclient.grpc import service_pb2 as pb

from redraft.serving.guard import over_grpc, over_http
from redraft.serving.guard.limits import Room
from redraft.serving.guard.refusal import room_for_bodies
from tests.serving.client_side import free_ports

SERVICE = "/inference.GRPCInferenceService/"


@dataclass
class Guarded:
    """A guard's ports, the folder of Triton's sockets, and what the stand-in there has seen: HTTP requests as method
    and path, headers and body, gRPC calls as name and message. `ended` is set when a request that hangs has been given
    up."""

    http_port: int
    grpc_port: int
    metrics_port: int
    folder: Path
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    calls: list[tuple[str, bytes]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    room: Room = field(default_factory=room_for_bodies)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"


async def _answer(seen: Guarded, request: web.BaseRequest) -> web.StreamResponse:
    """Answers by the field `text_input`; anything else with its own body."""
    body = await request.read()
    seen.requests.append((f"{request.method} {request.path}", dict(request.headers), body))
    told = json.loads(body).get("text_input") if body.startswith(b"{") and "infer" not in request.path else None
    if isinstance(told, dict) and "status" in told:
        return web.Response(status=told["status"], text=told["body"], content_type=told.get("type", "application/json"))
    if told == "hang":
        try:
            await asyncio.sleep(60)
        finally:
            seen.ended.set()
    if told == "die" and not request.path.endswith("stream"):
        request.transport.abort()  # type: ignore[union-attr]
    if not request.path.endswith("stream"):
        return web.Response(body=body or b"{}", content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    await response.write(b'data: {"text_output":"a"}\n\n')
    if told == "die":
        await response.write(b'data: {"text_')
        await asyncio.sleep(0.1)
        request.transport.abort()  # type: ignore[union-attr]
    pieces = {"wait": b": nothing\n\n", "flood": b":" + b" " * 2**20 + b"\n\n"}
    if told in pieces:
        try:
            while True:
                await asyncio.sleep(0.01)
                await response.write(pieces[told])
        finally:
            seen.ended.set()
    await response.write(b'data: {"text_output":"b"}\n\n')
    return response


class _Calls(grpc.GenericRpcHandler):
    """Streams answer each request with its id; one with the id "hang" is never answered, "die" ends the call."""

    def __init__(self, seen: Guarded):
        self._seen = seen

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        name = call.method.removeprefix(SERVICE)
        if name == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._stream)

        async def answer(data: bytes, context: aio.ServicerContext) -> bytes:
            self._seen.calls.append((name, data))
            if name == "ModelInfer" and (id := pb.ModelInferRequest.FromString(data).id).startswith("die "):
                await context.abort(grpc.StatusCode.UNAVAILABLE, id.removeprefix("die "))
            return data

        return grpc.unary_unary_rpc_method_handler(answer)

    async def _stream(self, requests: AsyncIterator[bytes], context: aio.ServicerContext) -> None:
        async for data in requests:
            self._seen.calls.append(("ModelStreamInfer", data))
            request = pb.ModelInferRequest.FromString(data)
            if request.id == "die":
                await context.abort(grpc.StatusCode.INTERNAL, "died")
            await context.write(
                pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(id=request.id)).SerializeToString()
            )
            if request.id == "hang":
                try:
                    await asyncio.sleep(60)
                finally:
                    self._seen.ended.set()


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[Guarded]:
    """A guard in front of the stand-in."""
    seen = Guarded(*free_ports(3), folder)
    http, calls = folder / "h", folder / "g"
    ready = threading.Event()

    async def run() -> None:
        triton = web.ServerRunner(web.Server(lambda request: _answer(seen, request), handler_cancellation=True))
        await triton.setup()
        await web.UnixSite(triton, str(http)).start()
        server = aio.server()
        server.add_generic_rpc_handlers((_Calls(seen),))
        server.add_insecure_port(f"unix:{calls}")
        await server.start()
        async with (
            over_http.listening("127.0.0.1", seen.http_port, http, seen.room),
            over_http.listening("127.0.0.1", seen.metrics_port, http, seen.room, (), over_http.metrics_route),
            over_grpc.listening("127.0.0.1", seen.grpc_port, calls, seen.room),
        ):
            ready.set()
            await asyncio.get_running_loop().run_in_executor(None, done.wait)
        await asyncio.gather(server.stop(0), triton.cleanup())

    done = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(30)
        yield seen
    finally:
        done.set()
        thread.join()
