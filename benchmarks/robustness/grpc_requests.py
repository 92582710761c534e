"""Malformed gRPC requests of Triton's protocol: calls and their messages, and bytes that are no call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import serialize_byte_tensor

from benchmarks.robustness.http_requests import TEXT, TOKENS, Raw

_SIZES = (-1, 0, 1, 2, 7, 2**31, 2**62, -(2**63))
_CALLS = (
    "RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister", "CudaSharedMemoryRegister",
    "TraceSetting", "LogSettings", "ModelConfig", "ModelStatistics", "ModelMetadata", "ServerReady", "Surprise",
)  # fmt: skip
_LARGE, _RARE = 5 * 2**20, 25


@dataclass(frozen=True)
class Call:
    """A call's name, and its messages as bytes. Inference is asked for in a stream or, if `unary`, one by one. A
    `patient` client without messages stays until the server ends the call."""

    name: str
    messages: tuple[bytes, ...]
    unary: bool = True
    patient: bool = False


def request(rng: random.Random) -> tuple[str, Call | Raw]:
    """One request and its kind."""
    make = rng.choice(_KINDS)
    return make.__name__.strip("_"), make(rng)


def valid(text: str = TEXT, tokens: int = TOKENS, **numbers: int) -> pb.ModelInferRequest:
    """A request that is right, with a seed and the like as 64-bit numbers."""
    made = pb.ModelInferRequest(model_name="ensemble")
    add(made, "text_input", "BYTES", serialize_byte_tensor(np.array([text.encode()], np.object_)).item())
    add(made, "max_tokens", "INT32", np.int32(tokens).tobytes())
    add(made, "stream", "BOOL", b"\1")
    for name, number in numbers.items():
        add(made, name, "UINT64", np.uint64(number).tobytes())
    return made


def add(made: pb.ModelInferRequest, name: str, kind: str, content: bytes) -> None:
    """Add an input of one element."""
    made.inputs.add(name=name, datatype=kind, shape=(1, 1))
    made.raw_input_contents.append(content)


def _infer(rng: random.Random, *messages: bytes) -> Call:
    """In a stream, perhaps with a right request after them."""
    if rng.random() < 0.3:
        return Call("ModelInfer", messages[:1])
    after = (valid().SerializeToString(),) if rng.random() < 0.2 else ()
    return Call("ModelStreamInfer", (*messages, *after), unary=False)


def _garbage(rng: random.Random) -> Call:
    return _infer(rng, rng.choice((b"", rng.randbytes(rng.randint(1, 300)), b"\x0a" * 1000, b"\x3b" * 1000)))


def _truncated(rng: random.Random) -> Call:
    data = valid().SerializeToString()
    return _infer(rng, data[: rng.randrange(len(data))])


def _flipped(rng: random.Random) -> Call:
    data = bytearray(valid(seed=3).SerializeToString())
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return _infer(rng, bytes(data))


def _wrong_type(rng: random.Random) -> Call:
    made = valid()
    made.inputs[rng.randrange(3)].datatype = rng.choice(
        ("FP32", "INT64", "BYTES", "BOOL", "FP16", "BF16", "", "X" * 999)
    )
    return _infer(rng, made.SerializeToString())


def _wrong_shape(rng: random.Random) -> Call:
    made = valid()
    made.inputs[rng.randrange(3)].shape[:] = rng.choices(_SIZES, k=rng.choice((0, 1, 2, 3, 40)))
    return _infer(rng, made.SerializeToString())


def _wrong_content(rng: random.Random) -> Call:
    """Contents of another length, with other lengths inside, of none or too many inputs, or twice."""
    made = valid()
    contents = (b"", b"\xff" * 4, b"\xff\xff\xff\xff" + b"a" * 9, b"\x02\0\0\0\xff\xfe", b"\0" * 99, b"\x05\0\0\0a")
    made.raw_input_contents[rng.randrange(3)] = rng.choice(contents)
    if rng.random() < 0.3:
        del made.raw_input_contents[rng.randrange(3) :]
    if rng.random() < 0.2:
        made.inputs[0].contents.bytes_contents.append(b"a")
    return _infer(rng, made.SerializeToString())


def _wrong_inputs(rng: random.Random) -> Call:
    """One that is missing, unknown, or there twice."""
    made = valid()
    if rng.random() < 0.5:
        del made.inputs[rng.randrange(3)]
    for _ in range(rng.choice((0, 1, 500))):
        add(made, rng.choice(("surprise", "max_tokens", "", "\u00e9")), "INT32", b"\1\0\0\0")
    return _infer(rng, made.SerializeToString())


def _wrong_model(rng: random.Random) -> Call:
    made = valid()
    made.model_name = rng.choice(("", "nope", "engine_worker", "../ensemble", "ensemble\0", "a" * 10_000))
    made.model_version = rng.choice(("", "2", "-1", "x", "9" * 99))
    return _infer(rng, made.SerializeToString())


def _parameters(rng: random.Random) -> Call:
    """Classification, shared memory, and wrong types of a request's own parameters."""
    made = valid()
    output = made.outputs.add(name=rng.choice(("text_output", "nope", "")))
    holder = rng.choice((output.parameters, made.inputs[0].parameters, made.parameters))
    names = ("classification", "shared_memory_region", "timeout", "priority", "sequence_id", "sequence_end", "x" * 999)
    given = holder[rng.choice(names)]
    setattr(
        given, *rng.choice((("int64_param", -1), ("int64_param", 1), ("string_param", "a"), ("double_param", 1e300)))
    )
    return _infer(rng, made.SerializeToString())


def _wrong_value(rng: random.Random) -> Call:
    made = valid(tokens=rng.choice((-(2**31), -1, 0, 2**31 - 1)), text=rng.choice(("", "\0", "a" * 500_000)))
    return _infer(rng, made.SerializeToString())


def _large(rng: random.Random) -> Call:
    """Rarely more than a server takes; else many in one stream."""
    if rng.randrange(_RARE) == 0:
        return _infer(rng, valid("a" * _LARGE).SerializeToString())
    return Call("ModelStreamInfer", (b"\xff",) * 200, unary=False)


def _slow(rng: random.Random) -> Call:
    """No message, whose client rarely waits until the server gives it up."""
    return Call(rng.choice(("ModelInfer", "ModelConfig", "ServerReady")), (), patient=rng.randrange(4 * _RARE) == 0)


def _other_call(rng: random.Random) -> Call:
    return Call(rng.choice(_CALLS), (rng.choice((b"", b"\x0a\x01x", rng.randbytes(99))),))


def _frames(rng: random.Random) -> Raw:
    """Bytes on the port: no HTTP/2, or frames that make no sense."""
    start = rng.choice(
        (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
    )
    return Raw(
        start + rng.choice((rng.randbytes(500), b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 99, b"\0\0\0\1\4\0\0\0\1" * 9))
    )


_KINDS: tuple[Callable[[random.Random], Call | Raw], ...] = (
    _garbage, _truncated, _flipped, _wrong_type, _wrong_shape, _wrong_content, _wrong_inputs, _wrong_model, _parameters,
    _wrong_value, _large, _slow, _other_call, _frames,
)  # fmt: skip
