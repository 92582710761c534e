"""gRPC through the guard: what passes, what is refused with which status, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc import aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from redraft.errors import RequestError
from redraft.serving.guard import over_grpc
from redraft.serving.guard.limits import MAX_BODIES_BYTES, MAX_BODY_BYTES, MAX_HEADER_BYTES, MAX_STREAMS
from redraft.serving.guard.refusal import TRITON_AWAY, TRITON_SHUTTING_DOWN, room_for_bodies
from redraft.worker.protocol import STOPPING
from tests.conftest import wait_until
from tests.serving.client_side import free_ports
from tests.serving.guard.by_hand import connected, framed
from tests.serving.guard.stand_in import SERVICE

CODE = grpc.StatusCode
HEALTH = "/grpc.health.v1.Health/Check"


@pytest.fixture
def channel(guard) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(guard.grpc) as channel:
        yield channel


@pytest.fixture
def triton(channel) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(channel)


def request(model_name: str = "ensemble", **fields: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name=model_name, **fields)


def with_output(name: str) -> pb.ModelInferRequest:
    """A request with a parameter of an output."""
    made = request()
    made.outputs.add(name="y").parameters[name].int64_param = 1
    return made


def with_input(*shape: int, parameter: str = "") -> pb.ModelInferRequest:
    made = request()
    tensor = made.inputs.add(name="x", datatype="INT32", shape=shape)
    if parameter:
        tensor.parameters[parameter].string_param = "r"
    return made


def with_inputs(count: int, **fields: Any) -> pb.ModelInferRequest:
    return request(inputs=[pb.ModelInferRequest.InferInputTensor(**fields)] * count)


def with_texts(size: int, count: int) -> pb.ModelInferRequest:
    """A request with an input of texts, whose shape and content need not agree."""
    made = request()
    made.inputs.add(name="x", datatype="BYTES", shape=[1, size]).contents.bytes_contents.extend([b""] * count)
    return made


def with_parameters(count: int) -> pb.ModelInferRequest:
    made = request()
    for number in range(count):
        made.parameters[str(number)].bool_param = True
    return made


def idle(over: threading.Event, *messages: Any) -> Iterator[Any]:
    """The messages of a client that then sends nothing, but stays."""
    yield from messages
    over.wait()


def answers(triton: GRPCInferenceServiceStub) -> bool:
    """Whether a request is not refused."""
    try:
        return bool(triton.ModelInfer(request(), timeout=30))
    except grpc.RpcError:
        return False


REFUSED = [
    (request("nope"), CODE.NOT_FOUND, "unknown model 'nope': expected one of ensemble"),
    (request(model_version="2"), CODE.NOT_FOUND, "unknown version '2' of ensemble"),
    (with_output("classification"), CODE.INVALID_ARGUMENT, "'y': the parameter 'classification' is not served"),
    (with_output("shared_memory_region"), CODE.INVALID_ARGUMENT, "'y': the parameter 'shared_memory_region'"),
    (with_input(1, parameter="shared_memory_region"), CODE.INVALID_ARGUMENT, "'x': the parameter 'shared_memory_reg"),
    (with_input(1, -1), CODE.INVALID_ARGUMENT, "input 'x': shape: expected no negative size"),
    (with_input(2**62, 4), CODE.RESOURCE_EXHAUSTED, "input 'x': shape: expected at most"),
    (request(id="a\0"), CODE.INVALID_ARGUMENT, "id 'a\\x00': expected a text without NUL"),
    (request(id="a" * 257), CODE.RESOURCE_EXHAUSTED, "id: expected at most 256 characters, got 257"),
    (with_parameters(129), CODE.RESOURCE_EXHAUSTED, "parameters: expected at most 128, got 129"),
    (with_texts(1, 4097), CODE.RESOURCE_EXHAUSTED, "input 'x': expected at most 4096, got 4097"),
    (with_texts(4097, 0), CODE.RESOURCE_EXHAUSTED, "input 'x': shape: expected at most 4096 elements"),
    (request(raw_input_contents=[b""] * 65), CODE.RESOURCE_EXHAUSTED, "raw_input_contents: expected at most 64, got"),
    (with_inputs(1, name="x" * 257), CODE.RESOURCE_EXHAUSTED, "inputs: name: expected at most 256 characters"),
    (with_inputs(1, datatype="x" * 257), CODE.RESOURCE_EXHAUSTED, "input '': datatype: expected at most 256"),
    (with_inputs(65), CODE.RESOURCE_EXHAUSTED, "inputs: expected at most 64, got 65"),
]


@pytest.mark.parametrize(("message", "code", "text"), REFUSED)
def test_requests_that_triton_must_not_see(guard, triton, message, code, text):
    with pytest.raises(grpc.RpcError) as refused:
        triton.ModelInfer(message, timeout=30)
    assert (refused.value.code(), text in refused.value.details()) == (code, True), refused.value.details()
    assert not guard.calls


def test_messages_beyond_what_all_may_have_are_refused(guard, triton):
    """One room for both protocols."""
    with guard.room.body() as take:
        take(MAX_BODIES_BYTES - 5)
        with pytest.raises(grpc.RpcError, match="overloaded: bodies of 67108864 bytes are held") as refused:
            triton.ModelInfer(request(), timeout=30)
        assert refused.value.code() is CODE.UNAVAILABLE
        (answer,) = triton.ModelStreamInfer(iter([request(id="a")]), timeout=30)
        assert answer.error_message.startswith("[rate_limit_exceeded] overloaded: bodies of 67108864 bytes are held")
        assert answer.infer_response.id == "a"
    triton.ModelInfer(request(), timeout=30)
    assert [answer.error_message for answer in triton.ModelStreamInfer(iter([request()]), timeout=30)] == [""]


def test_a_request_passes_as_it_came(guard, channel):
    """With what this version of the protocol does not know."""
    data = with_input(1, 1).SerializeToString() + b"\xba\x3e\x01a"
    call = channel.unary_unary(f"{SERVICE}ModelInfer")
    assert call(data, timeout=30) == data
    assert guard.calls == [("ModelInfer", data)]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("ModelInfer", b"\xff"),
        ("ModelInfer", b"\x0a\x02\xff\xff"),  # a name that is not UTF-8
        ("ModelReady", b"\x0a\x02\xff\xff"),
        ("ModelStatistics", b"\x0a" * 1000),
    ],
)
def test_what_is_no_request(guard, channel, name, data):
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(f"{SERVICE}{name}")(data, timeout=30)
    assert refused.value.code() is CODE.INVALID_ARGUMENT
    assert not guard.calls


def test_sizes_are_limited(guard, triton):
    for options in ({"id": "a" * (MAX_BODY_BYTES + 1)}, {"metadata": (("a", "b" * (MAX_HEADER_BYTES + 1)),)}):
        with pytest.raises(grpc.RpcError) as refused:
            triton.ModelInfer(request(id=options.get("id", "")), metadata=options.get("metadata"), timeout=30)
        assert refused.value.code() is CODE.RESOURCE_EXHAUSTED
    assert not guard.calls


def test_calls_that_run_nothing(guard, channel, triton):
    triton.ServerReady(pb.ServerReadyRequest(), timeout=30)
    triton.ModelReady(pb.ModelReadyRequest(name="tensorrt_llm"), timeout=30)
    triton.ModelStatistics(pb.ModelStatisticsRequest(), timeout=30)
    channel.unary_unary(HEALTH)(b"", timeout=30)
    assert [name for name, _ in guard.calls] == [
        "ServerReady", "ModelReady", "ModelStatistics", HEALTH
    ]  # fmt: skip
    with pytest.raises(grpc.RpcError) as refused:
        triton.ModelConfig(pb.ModelConfigRequest(), timeout=30)
    assert refused.value.code() is CODE.NOT_FOUND, "without a name"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("RepositoryModelLoad", CODE.PERMISSION_DENIED),
        ("RepositoryIndex", CODE.PERMISSION_DENIED),
        ("SystemSharedMemoryRegister", CODE.PERMISSION_DENIED),
        ("CudaSharedMemoryStatus", CODE.PERMISSION_DENIED),
        ("TraceSetting", CODE.PERMISSION_DENIED),
        ("LogSettings", CODE.PERMISSION_DENIED),
        ("Surprise", CODE.UNIMPLEMENTED),
    ],
)
def test_other_calls_are_refused(guard, channel, name, code):
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(f"{SERVICE}{name}")(b"", timeout=30)
    assert refused.value.code() is code
    assert not guard.calls


@pytest.mark.parametrize(
    ("text", "status", "details"),
    [
        ("[rate_limit_exceeded] the queue is full", CODE.UNAVAILABLE, "the queue is full"),
        ("[cancelled] by the client", CODE.CANCELLED, "by the client"),
        ("the server is stopping", CODE.UNAVAILABLE, TRITON_AWAY),  # Triton's own, or a connection that was lost
    ],
)
def test_errors_have_the_status_of_their_code(triton, text, status, details):
    with pytest.raises(grpc.RpcError) as failed:
        triton.ModelInfer(request(id=f"die {text}"), timeout=30)
    assert (failed.value.code(), failed.value.details()) == (status, details)


@pytest.mark.parametrize("name", ["ModelInfer", "ModelStreamInfer", "ModelReady"])
def test_a_message_that_does_not_arrive(guard, channel, triton, name, monkeypatch):
    """A client sends headers, or half a message, and stays. It keeps no place."""
    monkeypatch.setattr(over_grpc, "BODY_S", 0.2)
    monkeypatch.setattr(over_grpc, "MAX_CALLS", 1)
    over = threading.Event()
    with pytest.raises(grpc.RpcError, match="the message did not arrive within") as refused:
        channel.stream_unary(f"{SERVICE}{name}")(idle(over), timeout=30)
    over.set()
    assert refused.value.code() is CODE.DEADLINE_EXCEEDED
    with connected(guard.grpc_port) as connection:
        connection.call(f"{SERVICE}{name}", framed(b"a" * 1000)[:100])
        assert connection.receives(b"the message did not arrive within")
        assert not guard.calls
        monkeypatch.setattr(over_grpc, "BODY_S", 30.0)
        assert answers(triton)


def test_calls_without_a_message(guard, channel, triton):
    for name in ("ModelInfer", "ModelReady"):
        with pytest.raises(grpc.RpcError, match="the call has no message") as refused:
            channel.stream_unary(f"{SERVICE}{name}")(iter(()), timeout=30)
        assert refused.value.code() is CODE.INVALID_ARGUMENT
    assert list(triton.ModelStreamInfer(iter(()), timeout=30)) == []
    assert not guard.calls


def test_a_stream_that_has_sent_a_request_may_wait(triton, monkeypatch):
    monkeypatch.setattr(over_grpc, "BODY_S", 1.0)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    requests.put(request(id="1"))
    stream = triton.ModelStreamInfer(iter(requests.get, None), timeout=30)
    assert next(stream).infer_response.id == "1"
    time.sleep(1.2)
    requests.put(request(id="2"))
    requests.put(None)
    assert [answer.infer_response.id for answer in stream] == ["2"]


def test_health_gets_through_where_clients_take_no_answers(guard, channel, monkeypatch):
    """The library keeps their calls, as many as a connection may have, however many connections there are."""
    monkeypatch.setattr(over_grpc, "METADATA_S", 30.0)
    with contextlib.ExitStack() as connections:
        for calls in (300, 300, MAX_STREAMS + 50):
            held = len(guard.calls) + min(calls, MAX_STREAMS)
            connections.enter_context(connected(guard.grpc_port, window=0)).call(HEALTH, times=calls)
            wait_until(lambda held=held: len(guard.calls) == held, timeout=60)
        assert channel.unary_unary(HEALTH)(b"", timeout=30) == b""
        assert len(guard.calls) == held + 1


def test_a_refused_request_whose_client_takes_no_answer_has_no_room(guard, monkeypatch):
    """Or 16 such streams would leave no room for anybody's body."""
    refused = threading.Event()

    def refuse(_: pb.ModelInferRequest) -> None:
        refused.set()
        raise RequestError("no")

    monkeypatch.setattr(over_grpc, "check_infer", refuse)
    with connected(guard.grpc_port, window=0) as connection:
        connection.call(f"{SERVICE}ModelStreamInfer", framed(request().SerializeToString()))
        assert refused.wait(60)
        wait_until(lambda: not guard.room._taken, timeout=20)


@pytest.mark.parametrize(
    "failing", [RequestError("no"), aio.AioRpcError(CODE.INTERNAL, aio.Metadata(), aio.Metadata())]
)
def test_a_call_that_fails_holds_nothing_while_its_end_is_sent(tmp_path, failing, monkeypatch):
    """A client that reads nothing keeps that waiting."""

    def fail(_: pb.ModelInferRequest) -> None:
        raise failing

    async def held() -> tuple[int, int, Any]:
        seen: list[Any] = []

        class Context:
            async def read(self) -> bytes:
                return request().SerializeToString()

            async def abort(self, code: Any, details: str) -> None:
                seen.append((guard._calls, guard._room._taken, code))

        async with aio.insecure_channel("unix:none") as channel:
            guard = over_grpc.GrpcGuard(channel, tmp_path / "g", room_for_bodies())
            await guard._ending(guard._counted(guard._run))(None, Context())
        return seen[0]

    monkeypatch.setattr(over_grpc, "check_infer", fail)
    assert asyncio.run(held()) == (0, 0, CODE.INTERNAL if isinstance(failing, grpc.RpcError) else CODE.INVALID_ARGUMENT)


def test_health_gets_through_where_clients_hold_all_places(guard, channel, triton, monkeypatch):
    monkeypatch.setattr(over_grpc, "MAX_CALLS", 2)
    over = threading.Event()
    streams = [triton.ModelStreamInfer(idle(over, request()), timeout=30) for _ in range(2)]
    assert [next(stream).error_message for stream in streams] == ["", ""]
    for call in (triton.ModelInfer, lambda asked, timeout: list(triton.ModelStreamInfer(iter([asked]), timeout))):
        with pytest.raises(grpc.RpcError, match="overloaded: 2 calls are in flight: try again later") as refused:
            call(request(), timeout=30)
        assert refused.value.code() is CODE.UNAVAILABLE
    for name in ("grpc.health.v1.Health/Check", "inference.GRPCInferenceService/ServerReady"):
        assert channel.stream_unary(f"/{name}")(idle(over), timeout=30) == b""
    streams[0].cancel()
    wait_until(lambda: answers(triton))
    over.set()
    assert list(streams[1]) == []


def test_a_server_that_is_not_there(tmp_path):
    """It restarts, or the service is being stopped."""
    (port,) = free_ports(1)

    async def ask() -> tuple[Any, str]:
        async with (
            over_grpc.listening("127.0.0.1", port, tmp_path / "g", room_for_bodies()),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            with pytest.raises(grpc.RpcError) as refused:
                await GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=30)
        return refused.value.code(), refused.value.details()

    assert asyncio.run(ask()) == (CODE.UNAVAILABLE, TRITON_AWAY)
    (tmp_path / STOPPING).touch()
    assert asyncio.run(ask()) == (CODE.UNAVAILABLE, TRITON_SHUTTING_DOWN)


def test_a_stream_outlives_its_refused_requests(guard, triton):
    """Each is answered in the stream by its id, as Triton does."""
    refused = []
    for number, (message, _, _) in enumerate(REFUSED):
        refused.append(pb.ModelInferRequest(id=f"refused {number}"))
        refused[-1].MergeFrom(message)
    asked = [request(id="1"), *refused, request(id="2")]
    answers = list(triton.ModelStreamInfer(iter(asked), timeout=30))
    texts = [answer.error_message for answer in answers if answer.error_message]
    assert all(text in given for given, (_, _, text) in zip(texts, REFUSED, strict=True))
    assert [answer.infer_response.id for answer in answers if answer.error_message] == [made.id for made in refused]
    assert [answer.infer_response.id for answer in answers if not answer.error_message] == ["1", "2"]
    assert len(guard.calls) == 2


def test_a_stream_that_triton_ends(triton):
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    requests.put(request(id="die"))
    with pytest.raises(grpc.RpcError) as failed:
        list(triton.ModelStreamInfer(iter(requests.get, None), timeout=30))
    requests.put(None)
    assert (failed.value.code(), failed.value.details()) == (CODE.INTERNAL, "died")


@pytest.mark.parametrize("way", ["cancels", "disconnects", "has waited long enough"])
def test_a_client_that_goes_away_is_noticed_at_once(guard, way):
    channel = grpc.insecure_channel(guard.grpc)
    grpc.channel_ready_future(channel).result(60)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    requests.put(request(id="hang"))
    stub = GRPCInferenceServiceStub(channel)
    call = stub.ModelStreamInfer(iter(requests.get, None), timeout=2 if way == "has waited long enough" else None)
    assert next(call).infer_response.id == "hang"
    if way == "cancels":
        call.cancel()
    elif way == "disconnects":
        channel.close()
    assert guard.ended.wait(30)
    requests.put(None)
    channel.close()
