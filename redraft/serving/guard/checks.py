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

from redraft.errors import Code, RequestError
from redraft.request import INT32_MAX, clipped
from redraft.serving.guard.limits import MAX_ELEMENTS, MAX_FIELDS, MAX_ITEMS, MAX_NAME, MAX_TENSORS
from redraft.serving.tritonserver import MODELS

_MAX_SHOWN = 100
_BYTES, _INT32 = "BYTES", "INT32"
"""Triton's data types of texts, and of the models' integers."""
_WIDE = ("random_seed", "seed", "timeout", "priority", "sequence_id")
"""Fields that may be integers of 64 bits."""


def check_model(name: str, version: str = "") -> None:
    """Refuse a model that is not served. Raises RequestError."""
    if name not in MODELS:
        raise RequestError(
            f"unknown model {clipped(name, _MAX_SHOWN)!r}: expected one of {', '.join(MODELS)}", Code.MODEL_NOT_FOUND
        )
    if version not in ("", "1"):
        raise RequestError(
            f"unknown version {clipped(version, _MAX_SHOWN)!r} of {name}: expected 1", Code.MODEL_NOT_FOUND
        )


def checked_json(data: bytes, infer: bool) -> bytes:
    """A request's JSON, written anew: of a repeated key Triton would read the first, this reader the last. NaN and
    infinity pass, as Triton knows them and the models refuse them by the field's name. Raises RequestError.

    The reader refuses more than 200 levels. Triton's has no limit before April 2026, and a million end it.
    """
    if not data.strip():
        raise RequestError("the body is empty: expected a JSON object")
    with _without_garbage_collection():
        try:
            body = from_json(data, cache_strings="none")
        except ValueError as error:
            raise RequestError(f"the body is not valid JSON: {clipped(_why(data, error), _MAX_SHOWN)}") from None
        if not isinstance(body, dict):
            raise RequestError(f"the body is not a JSON object but {type(body).__name__}: expected an object")
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
    """Refuse what a gRPC inference request may not say. Raises RequestError."""
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
    """A gRPC message. Raises RequestError."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise RequestError(f"the message is not a {message.DESCRIPTOR.name}, or a string is not UTF-8") from None
    return message


def _why(data: bytes, error: ValueError) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        return f"expected UTF-8 text, got {wrong.reason} at byte {wrong.start}"
    return str(error).replace("unexpected end of hex escape", "half of a surrogate pair")


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the collector: a body of many lists takes four times as long to read while it looks for circles."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_tensors(body: dict[str, Any]) -> None:
    """Refuse what an HTTP inference request may not say."""
    for kind, known in (("inputs", ("binary_data_size",)), ("outputs", ("binary_data",))):
        tensors = body.get(kind, [])
        if isinstance(tensors, list):
            _check_count(kind, tensors)
        if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
            raise RequestError(f"{kind}: expected a list of objects")
        for tensor in tensors:
            _check_fields(kind, tensor)
            _check_name(f"{kind}: name", tensor.get("name"))
            name, parameters = clipped(str(tensor.get("name", "")), _MAX_SHOWN), tensor.get("parameters", {})
            _check_fields(f"{kind} {name!r}: parameters", parameters)
            _check_parameters(name, parameters, known)
            if kind == "inputs":
                shape, datatype = tensor.get("shape", []), tensor.get("datatype")
                if not isinstance(shape, list) or any(type(size) is not int for size in shape):
                    raise RequestError(f"{kind} {name!r}: shape: expected a list of integers")
                _check_name(f"{kind} {name!r}: datatype", datatype)
                _check_shape(name, datatype, shape)
                _check_items(f"{kind} {name!r}: data", tensor.get("data"), datatype == _INT32)


def _check_fields(what: str, value: Any) -> None:
    """Refuse what is no JSON object, or has too many keys, or one that Triton would read to its middle."""
    if not isinstance(value, dict):
        raise RequestError(f"{what}: expected an object")
    if len(value) > MAX_FIELDS:
        raise RequestError(f"{what}: expected at most {MAX_FIELDS} fields, got {len(value)}", Code.TOO_LARGE)
    for key in value:
        _check_name(f"{what}: the field", key)


def _check_name(what: str, value: Any) -> None:
    """Refuse a text that Triton would read to its middle, or repeat although it is long. What is no text it refuses
    itself."""
    if isinstance(value, str):
        if "\0" in value:
            raise RequestError(f"{what} {clipped(value, _MAX_SHOWN)!r}: expected a text without NUL characters")
        if len(value) > MAX_NAME:
            raise RequestError(f"{what}: expected at most {MAX_NAME} characters, got {len(value)}", Code.TOO_LARGE)


def _check_items(what: str, value: Any, narrow: bool) -> None:
    """Refuse a value, lists in lists included, with too many items that are no numbers, or an integer of more than 32
    bits where it is `narrow`: Triton would cut it to another one."""
    lists, count = [value if isinstance(value, list) else [value]], 0
    while lists:
        items = lists.pop()
        kinds = {*map(type, items)}
        if kinds == {int} and narrow and not (min(items) >= -INT32_MAX - 1 and max(items) <= INT32_MAX):
            raise RequestError(f"{what}: expected integers of at most 32 bits")
        if kinds <= {int, float, bool}:
            continue
        count += len(items)
        if count > MAX_ITEMS:
            raise RequestError(f"{what}: expected at most {MAX_ITEMS} items that are no numbers", Code.TOO_LARGE)
        lists += [item for item in items if isinstance(item, list)]


def _check_count(kind: str, items: Sized, most: int = MAX_TENSORS) -> None:
    if len(items) > most:
        raise RequestError(f"{kind}: expected at most {most}, got {len(items)}", Code.TOO_LARGE)


def _check_shape(name: str, datatype: Any, shape: Sequence[int]) -> None:
    sizes = shape[:16]
    if any(size < 0 for size in sizes):
        raise RequestError(f"input {clipped(name, _MAX_SHOWN)!r}: shape: expected no negative size")
    most = MAX_ITEMS if datatype == _BYTES else MAX_ELEMENTS
    if math.prod(max(size, 1) for size in sizes) > most or len(shape) > 16:
        raise RequestError(
            f"input {clipped(name, _MAX_SHOWN)!r}: shape: expected at most {most} elements", Code.TOO_LARGE
        )


def _check_parameters(name: str, parameters: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse a tensor's parameter that is not among the known ones: Triton's are `classification`, which ends it, and
    shared memory, which is closed."""
    for parameter in parameters:
        if parameter not in known:
            raise RequestError(
                f"{clipped(name, _MAX_SHOWN)!r}: the parameter {clipped(parameter, _MAX_SHOWN)!r} is not served: "
                f"expected {' or '.join(known) or 'none'}"
            )
