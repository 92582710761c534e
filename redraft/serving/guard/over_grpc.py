"""Triton's gRPC protocol. Messages are passed on as bytes, as they came, after they have been checked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf.message import Message
from grpc import aio
from tritonclient.grpc import service_pb2 as pb

from redraft.errors import Code, RequestError
from redraft.serving.guard.checks import check_infer, check_model, parsed
from redraft.serving.guard.limits import (
    BODY_S,
    END_S,
    MAX_BODY_BYTES,
    MAX_CALLS,
    MAX_HEADER_BYTES,
    MAX_STREAMS,
    METADATA_S,
    Room,
)
from redraft.serving.guard.refusal import triton_away
from redraft.serving.triton.messages import split_code, with_code

_SERVICE = "/inference.GRPCInferenceService/"
_HEALTH = (
    "/grpc.health.v1.Health/Check", f"{_SERVICE}ServerLive", f"{_SERVICE}ServerReady", f"{_SERVICE}ServerMetadata",
)  # fmt: skip
"""Calls about the server. Their messages, which say nothing, are not read, so that none is waited for."""
_ASKED: dict[str, Callable[[], Message]] = {
    f"{_SERVICE}ModelStatistics": pb.ModelStatisticsRequest,
    f"{_SERVICE}ModelReady": pb.ModelReadyRequest,
    f"{_SERVICE}ModelMetadata": pb.ModelMetadataRequest,
    f"{_SERVICE}ModelConfig": pb.ModelConfigRequest,
}
"""Calls about the models, with their messages."""
_CLOSED = ("Repository", "SystemSharedMemory", "CudaSharedMemory", "TraceSetting", "LogSettings")
"""Beginnings of the names of closed calls."""
_TO_TRITON = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
)
_FROM_CLIENTS = (
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", MAX_HEADER_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.so_reuseport", 0),
)

Handler = Callable[[aio.ServicerContext], Awaitable[Any]]
"""Answers a call. Unary calls are read like streams of one message: gRPC would begin others only when the message is
whole, and wait for that without limit. Raises RequestError, and Triton's AioRpcError."""


class GrpcGuard(grpc.GenericRpcHandler):
    """Passes calls on to the Triton server at a channel's other end."""

    def __init__(self, triton: aio.Channel, socket: Path, room: Room):
        self._triton, self._socket, self._room = triton, socket, room
        self._infer = triton.unary_unary(f"{_SERVICE}ModelInfer")
        self._stream_infer = triton.stream_stream(f"{_SERVICE}ModelStreamInfer")
        self._calls = 0
        self._handlers: dict[str, Handler] = {
            f"{_SERVICE}ModelInfer": self._counted(self._run),
            f"{_SERVICE}ModelStreamInfer": self._counted(self._run_stream),
            **{method: self._teller(method) for method in _HEALTH},
            **{method: self._counted(self._asker(method, kind)) for method, kind in _ASKED.items()},
        }

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """The handler of a call; None, which gRPC answers with UNIMPLEMENTED, for one that Triton does not know."""
        name = call.method.removeprefix(_SERVICE)
        handler = _closed(name) if name.startswith(_CLOSED) else self._handlers.get(call.method)
        if handler is None:
            return None
        streams = name == "ModelStreamInfer"
        kind = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        return kind(self._ending(handler))

    def _ending(self, handler: Handler) -> Callable[[Any, aio.ServicerContext], Awaitable[Any]]:
        """What gRPC calls. A failure is sent when the call holds nothing any more, neither a place nor room for its
        message: a client that does not read keeps it waiting."""

        async def handle(_: AsyncIterator[bytes], context: aio.ServicerContext) -> Any:
            try:
                return await handler(context)
            except RequestError as error:
                status, details = grpc.StatusCode[error.code.grpc], error.message
            except aio.AioRpcError as error:
                status, details = self._failure(error, context)
            return await context.abort(status, details)

        return handle

    def _counted(self, handler: Handler) -> Handler:
        """A handler of calls whose message is read: no more than MAX_CALLS of them at a time."""

        async def handle(context: aio.ServicerContext) -> Any:
            if self._calls >= MAX_CALLS:
                raise RequestError(f"overloaded: {MAX_CALLS} calls are in flight: try again later", Code.OVERLOADED)
            self._calls += 1
            try:
                return await handler(context)
            finally:
                self._calls -= 1

        return handle

    async def _run(self, context: aio.ServicerContext) -> bytes:
        with self._room.body() as take:
            data = await _message(context)
            take(len(data))
            check_infer(parsed(pb.ModelInferRequest, data))
            return await _answer(self._infer(data, timeout=context.time_remaining()))

    def _teller(self, method: str) -> Handler:
        call = self._triton.unary_unary(method)

        async def tell(_: aio.ServicerContext) -> bytes:
            return await _answer(call(b"", timeout=METADATA_S))

        return tell

    def _asker(self, method: str, kind: Callable[[], Message]) -> Handler:
        call = self._triton.unary_unary(method)

        async def ask(context: aio.ServicerContext) -> bytes:
            data = await _message(context)
            asked = parsed(kind, data)
            if asked.name or kind is not pb.ModelStatisticsRequest:
                check_model(asked.name, asked.version)
            return await _answer(call(data, timeout=METADATA_S))

        return ask

    async def _run_stream(self, context: aio.ServicerContext) -> None:
        """Run a stream's requests. One that is refused gets an error with its id, and the stream goes on.
        Where the client cancels or goes, gRPC cancels this."""
        first = await _first(context)
        call = self._stream_infer(timeout=context.time_remaining())
        one_at_a_time = asyncio.Lock()

        async def answer(data: bytes) -> None:
            async with one_at_a_time:
                await context.write(data)

        passing = asyncio.create_task(_pass_on(first, context, call, answer, self._room))
        try:
            while (data := await call.read()) is not aio.EOF:
                await answer(data)
        finally:
            passing.cancel()
            call.cancel()

    def _failure(self, error: aio.AioRpcError, context: aio.ServicerContext) -> tuple[grpc.StatusCode, str]:
        """The status and details for a call that Triton ended.

        A model's error has its code. Without one, UNAVAILABLE is a lost connection or a Triton that is ending, and a
        time limit that is not the client's is the guard's own: Triton is away.
        """
        status, (code, details) = error.code(), split_code(error.details() or "")
        if code is not None:
            return grpc.StatusCode[code.grpc], details
        late = status is grpc.StatusCode.DEADLINE_EXCEEDED and context.time_remaining() is None
        if late or status is grpc.StatusCode.UNAVAILABLE:
            away = triton_away(self._socket)
            return grpc.StatusCode[away.code.grpc], away.message
        return status, details


async def _answer(call: Any) -> bytes:
    """Triton's answer. The call ends with the one that waits for it."""
    try:
        return await call
    finally:
        call.cancel()


async def _first(context: aio.ServicerContext) -> bytes:
    """A call's first message, or EOF. Raises RequestError where it takes too long."""
    try:
        async with asyncio.timeout(BODY_S):
            return await context.read()
    except TimeoutError:
        raise RequestError(
            f"the message did not arrive within {BODY_S:.0f} s: begin with it", Code.BODY_TIMEOUT
        ) from None


async def _message(context: aio.ServicerContext) -> bytes:
    """The message of a unary call. Raises RequestError where it takes too long, or there is none."""
    if (data := await _first(context)) is aio.EOF:
        raise RequestError("the call has no message")
    return data


async def _pass_on(
    data: bytes, context: aio.ServicerContext, call: Any, answer: Callable[[bytes], Awaitable[None]], room: Room
) -> None:
    """Send a stream's requests, of which `data` is the first, to Triton. Where that has gone, who reads its answers is
    told."""
    with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
        while data is not aio.EOF:
            if error := await _send(data, call, room):
                await answer(error.SerializeToString())
            data = await context.read()
        await call.done_writing()


async def _send(data: bytes, call: Any, room: Room) -> pb.ModelStreamInferResponse | None:
    """Send a stream's request to Triton. The error that answers one that is refused, else None."""
    request = pb.ModelInferRequest()
    try:
        with room.body() as take:
            request = parsed(pb.ModelInferRequest, data)
            take(len(data))
            check_infer(request)
            await call.write(data)
    except RequestError as error:
        named = pb.ModelInferResponse(id=request.id)
        return pb.ModelStreamInferResponse(error_message=with_code(error.code, error.message), infer_response=named)
    return None


def _closed(name: str) -> Handler:
    async def refuse(_: aio.ServicerContext) -> None:
        raise RequestError(f"{name} is closed: this server takes requests for its models only", Code.CLOSED)

    return refuse


@contextlib.asynccontextmanager
async def listening(address: str, port: int, socket: Path, room: Room) -> AsyncIterator[None]:
    """Pass calls on to Triton's socket within the context."""
    async with aio.insecure_channel(f"unix:{quote(str(socket))}", options=_TO_TRITON) as triton:
        server = aio.server(options=_FROM_CLIENTS)
        server.add_generic_rpc_handlers((GrpcGuard(triton, socket, room),))
        server.add_insecure_port(f"{address}:{port}")
        await server.start()
        try:
            yield
        finally:
            await server.stop(END_S)
