"""What a request may say, over HTTP and over gRPC."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from google.protobuf.message import DecodeError, Message
from pydantic_core import from_json, to_json
from tritonclient.grpc import service_pb2 as pb

from redraft.request import clipped
from redraft.serving.guard.limits import MAX_ELEMENTS, MAX_TENSORS
from redraft.serving.guard.refusal import INVALID, TOO_LARGE, UNKNOWN, Refusal
from redraft.serving.tritonserver import MODELS

_MAX_SHOWN = 100


def check_model(name: str, version: str = "") -> None:
    """Raises Refusal for a model that is not served."""
    if name not in MODELS:
        raise Refusal(UNKNOWN, f"unknown model {clipped(name, _MAX_SHOWN)!r}: expected one of {', '.join(MODELS)}")
    if version not in ("", "1"):
        raise Refusal(UNKNOWN, f"unknown version {clipped(version, _MAX_SHOWN)!r} of {name}: expected 1")


def checked_json(data: bytes, infer: bool) -> bytes:
    """A request's JSON, written anew: of a repeated key Triton would read the first, this reader the last. NaN and
    infinity pass, as Triton knows them and the models refuse them by the field's name. Raises Refusal.

    The reader refuses more than 200 levels. Triton's has no limit before April 2026, and a million end it.
    """
    if not data.strip():
        raise Refusal(INVALID, "the body is empty: expected a JSON object")
    try:
        body = from_json(data, cache_strings="none")
    except ValueError as error:
        raise Refusal(INVALID, f"the body is not valid JSON: {clipped(_why(data, error), _MAX_SHOWN)}") from None
    if not isinstance(body, dict):
        raise Refusal(INVALID, f"the body is not a JSON object but {type(body).__name__}: expected an object")
    if infer:
        _check_tensors(body)
    return to_json(body, inf_nan_mode="constants")


def check_infer(request: pb.ModelInferRequest) -> None:
    """Raises Refusal for what a gRPC inference request may not say."""
    check_model(request.model_name, request.model_version)
    _check_count("inputs", request.inputs)
    _check_count("outputs", request.outputs)
    for tensor in request.inputs:
        _check_shape(tensor.name, tensor.shape)
        _check_parameters(tensor.name, tensor.parameters, ())
    for output in request.outputs:
        _check_parameters(output.name, output.parameters, ())


def parsed(kind: Callable[[], Message], data: bytes) -> Any:
    """A gRPC message. Raises Refusal."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise Refusal(INVALID, f"the message is not a {message.DESCRIPTOR.name}, or a string is not UTF-8") from None
    return message


def _why(data: bytes, error: ValueError) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        return f"expected UTF-8 text, got {wrong.reason} at byte {wrong.start}"
    return str(error).replace("unexpected end of hex escape", "half of a surrogate pair")


def _check_tensors(body: dict[str, Any]) -> None:
    """Raises Refusal for what an HTTP inference request may not say."""
    for kind, known in (("inputs", ("binary_data_size",)), ("outputs", ("binary_data",))):
        tensors = body.get(kind, [])
        if isinstance(tensors, list):
            _check_count(kind, tensors)
        if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
            raise Refusal(INVALID, f"{kind}: expected a list of objects")
        for tensor in tensors:
            name, parameters = clipped(str(tensor.get("name", "")), _MAX_SHOWN), tensor.get("parameters", {})
            if not isinstance(parameters, dict):
                raise Refusal(INVALID, f"{kind} {name!r}: parameters: expected an object")
            _check_parameters(name, parameters, known)
            if kind == "inputs":
                shape = tensor.get("shape", [])
                if not isinstance(shape, list) or any(type(size) is not int for size in shape):
                    raise Refusal(INVALID, f"{kind} {name!r}: shape: expected a list of integers")
                _check_shape(name, shape)


def _check_count(kind: str, tensors: Sized) -> None:
    if len(tensors) > MAX_TENSORS:
        raise Refusal(TOO_LARGE, f"{kind}: expected at most {MAX_TENSORS}, got {len(tensors)}")


def _check_shape(name: str, shape: Sequence[int]) -> None:
    sizes = shape[:16]
    if any(size < 0 for size in sizes):
        raise Refusal(INVALID, f"input {clipped(name, _MAX_SHOWN)!r}: shape: expected no negative size")
    if math.prod(max(size, 1) for size in sizes) > MAX_ELEMENTS or len(shape) > 16:
        raise Refusal(
            TOO_LARGE, f"input {clipped(name, _MAX_SHOWN)!r}: shape: expected at most {MAX_ELEMENTS} elements"
        )


def _check_parameters(name: str, parameters: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises Refusal for a tensor's parameter that is not among the known ones: Triton's are `classification`, which
    ends it, and shared memory, which is closed."""
    for parameter in parameters:
        if parameter not in known:
            raise Refusal(
                INVALID,
                f"{clipped(name, _MAX_SHOWN)!r}: the parameter {clipped(parameter, _MAX_SHOWN)!r} is not served: "
                f"expected {' or '.join(known) or 'none'}",
            )
