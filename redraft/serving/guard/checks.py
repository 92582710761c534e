"""What a request may say, over HTTP and over gRPC."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import DecodeError, Message
from pydantic_core import from_json, to_json
from tritonclient.grpc import service_pb2 as pb

from redraft.request import INT32_MAX, clipped
from redraft.serving.guard.limits import MAX_ELEMENTS, MAX_FIELDS, MAX_ITEMS, MAX_NAME, MAX_TENSORS
from redraft.serving.guard.refusal import INVALID, TOO_LARGE, UNKNOWN, Refusal
from redraft.serving.tritonserver import MODELS

_MAX_SHOWN = 100
_BYTES, _INT32 = "BYTES", "INT32"
"""Triton's data types of texts, and of the models' integers."""
_WIDE = ("random_seed", "seed", "timeout", "priority", "sequence_id")
"""Fields that may be integers of 64 bits."""


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
    with _without_garbage_collection():
        try:
            body = from_json(data, cache_strings="none")
        except ValueError as error:
            raise Refusal(INVALID, f"the body is not valid JSON: {clipped(_why(data, error), _MAX_SHOWN)}") from None
        if not isinstance(body, dict):
            raise Refusal(INVALID, f"the body is not a JSON object but {type(body).__name__}: expected an object")
        _check_fields("the body", body)
        _check_fields("parameters", body.get("parameters", {}))
        _check_name("id", body.get("id"))
        if infer:
            _check_tensors(body)
        else:
            for name, value in (body | body.get("parameters", {})).items():
                _check_items(name, value, name not in _WIDE)
        return to_json(body, inf_nan_mode="constants")


def check_infer(request: pb.ModelInferRequest) -> None:
    """Raises Refusal for what a gRPC inference request may not say."""
    check_model(request.model_name, request.model_version)
    _check_name("id", request.id)
    _check_count("parameters", request.parameters, MAX_FIELDS)
    _check_count("inputs", request.inputs)
    _check_count("outputs", request.outputs)
    _check_count("raw_input_contents", request.raw_input_contents)
    for tensor in request.inputs:
        _check_name("inputs: name", tensor.name)
        _check_name(f"input {tensor.name!r}: datatype", tensor.datatype)
        _check_shape(tensor.name, tensor.datatype, tensor.shape)
        _check_count(f"input {tensor.name!r}", tensor.contents.bytes_contents, MAX_ITEMS)
        _check_parameters(tensor.name, tensor.parameters, ())
    for output in request.outputs:
        _check_name("outputs: name", output.name)
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


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A body of many lists takes four times as long to read while the collector looks for circles in them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_tensors(body: dict[str, Any]) -> None:
    """Raises Refusal for what an HTTP inference request may not say."""
    for kind, known in (("inputs", ("binary_data_size",)), ("outputs", ("binary_data",))):
        tensors = body.get(kind, [])
        if isinstance(tensors, list):
            _check_count(kind, tensors)
        if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
            raise Refusal(INVALID, f"{kind}: expected a list of objects")
        for tensor in tensors:
            _check_fields(kind, tensor)
            _check_name(f"{kind}: name", tensor.get("name"))
            name, parameters = clipped(str(tensor.get("name", "")), _MAX_SHOWN), tensor.get("parameters", {})
            _check_fields(f"{kind} {name!r}: parameters", parameters)
            _check_parameters(name, parameters, known)
            if kind == "inputs":
                shape, datatype = tensor.get("shape", []), tensor.get("datatype")
                if not isinstance(shape, list) or any(type(size) is not int for size in shape):
                    raise Refusal(INVALID, f"{kind} {name!r}: shape: expected a list of integers")
                _check_name(f"{kind} {name!r}: datatype", datatype)
                _check_shape(name, datatype, shape)
                _check_items(f"{kind} {name!r}: data", tensor.get("data"), datatype == _INT32)


def _check_fields(what: str, value: Any) -> None:
    """Raises Refusal for what is no JSON object, or has too many keys, or one that Triton would read to its middle."""
    if not isinstance(value, dict):
        raise Refusal(INVALID, f"{what}: expected an object")
    if len(value) > MAX_FIELDS:
        raise Refusal(TOO_LARGE, f"{what}: expected at most {MAX_FIELDS} fields, got {len(value)}")
    for key in value:
        _check_name(f"{what}: the field", key)


def _check_name(what: str, value: Any) -> None:
    """Raises Refusal for a text that Triton would read to its middle, or repeat although it is long. What is no text
    it refuses itself."""
    if isinstance(value, str):
        if "\0" in value:
            raise Refusal(INVALID, f"{what} {clipped(value, _MAX_SHOWN)!r}: expected a text without NUL characters")
        if len(value) > MAX_NAME:
            raise Refusal(TOO_LARGE, f"{what}: expected at most {MAX_NAME} characters, got {len(value)}")


def _check_items(what: str, value: Any, narrow: bool) -> None:
    """Raises Refusal for a value, lists in lists included, with too many items that are no numbers, or an integer of
    more than 32 bits where it is `narrow`: Triton would cut it to another one."""
    lists, count = [value if isinstance(value, list) else [value]], 0
    while lists:
        items = lists.pop()
        kinds = {*map(type, items)}
        if kinds == {int} and narrow and not (min(items) >= -INT32_MAX - 1 and max(items) <= INT32_MAX):
            raise Refusal(INVALID, f"{what}: expected integers of at most 32 bits")
        if kinds <= {int, float, bool}:
            continue
        count += len(items)
        if count > MAX_ITEMS:
            raise Refusal(TOO_LARGE, f"{what}: expected at most {MAX_ITEMS} items that are no numbers")
        lists += [item for item in items if isinstance(item, list)]


def _check_count(kind: str, items: Sized, most: int = MAX_TENSORS) -> None:
    if len(items) > most:
        raise Refusal(TOO_LARGE, f"{kind}: expected at most {most}, got {len(items)}")


def _check_shape(name: str, datatype: Any, shape: Sequence[int]) -> None:
    sizes = shape[:16]
    if any(size < 0 for size in sizes):
        raise Refusal(INVALID, f"input {clipped(name, _MAX_SHOWN)!r}: shape: expected no negative size")
    most = MAX_ITEMS if datatype == _BYTES else MAX_ELEMENTS
    if math.prod(max(size, 1) for size in sizes) > most or len(shape) > 16:
        raise Refusal(TOO_LARGE, f"input {clipped(name, _MAX_SHOWN)!r}: shape: expected at most {most} elements")


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
