"""Messages between the engine worker and its clients: msgpack maps over ZeroMQ.

Client to worker: `generate`, `cancel`, `status`, `replaced`. Worker to client: `chunk`, `error`, `status`, and `probe`,
which carries nothing and is ignored (the worker finds out with it whether a client is still there). Every message from
a client is checked field by field; what is wrong is said with the value that was given and the value that was expected.

A worker that has been `replaced` says `moved` to its clients: another one listens at the socket's path now. Where
`moved` has a `message`, it is one that came too late, as it was sent: the client sends it to the other worker.
"""

from __future__ import annotations

from typing import Any, Literal

import msgpack
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from redraft.errors import Code
from redraft.request import (
    Generated,
    GenerateRequest,
    InvalidRequest,
    StrictModel,
    describe,
    shown,
)

SUPERVISOR_PIPE = "supervisor.pipe"
"""Name of a pipe beside the worker's socket that a supervisor, where there is one, keeps open as long as it lives."""
STARTING = "starting"
"""Name of a file beside the worker's socket that is there until the service has answered its first request."""
STOPPING = "stopping"
"""Name of a file beside the worker's socket that is there while the service is being stopped."""
SHUTTING_DOWN = "the engine worker is shutting down"
PROBE = "redraft-probe"
"""Id of a request that a Triton model answers without the worker, to show that it lives."""
DRAIN_S = 20.0
"""How long a worker's requests have to end after SIGTERM, by default."""


class CancelRequest(StrictModel):
    """Stop the request `id` of the same client; unknown ids are ignored, since the request may just have finished."""

    op: Literal["cancel"] = "cancel"
    id: str


class StatusRequest(StrictModel):
    """Ask for the worker's state, with or without its metrics, which take a millisecond to write."""

    op: Literal["status"] = "status"
    metrics: bool = False


class ReplacedRequest(StrictModel):
    """Another worker listens at the socket's path now. Give new requests back, and end when the running ones have ended
    and the clients have left, at the latest after so many seconds."""

    op: Literal["replaced"] = "replaced"
    seconds: float = Field(ge=0, allow_inf_nan=False)


@dataclass(kw_only=True)
class Chunk(Generated):
    """New text of one request, whose prompt has `prompt_tokens`; the last one is `done`."""

    op: Literal["chunk"] = "chunk"
    id: str
    prompt_tokens: int = 0
    done: bool = False


class ErrorMessage(BaseModel):
    """The request `id` ended without a result."""

    op: Literal["error"] = "error"
    id: str
    code: Code
    message: str


class WorkerStatus(BaseModel):
    """State of a worker. `limits` are its bundle's, with those of `PromptLimits` and, where there is one,
    `max_per_client`."""

    op: Literal["status"] = "status"
    ready: bool = True
    running: int = 0
    waiting: int = 0
    kv_use: float = Field(default=0.0, description="share of all slots' cache rows in use, 0 to 1")
    submitted: int = Field(default=0, description="requests that were ever submitted to it")
    metrics: str = Field(default="", description="the page of its metrics since its start, where asked for")
    limits: dict[str, int] = Field(default_factory=dict)
    bundle: str = ""
    pid: int = 0


Request = GenerateRequest | CancelRequest | StatusRequest | ReplacedRequest
_REQUESTS: dict[str, type[StrictModel]] = {
    "generate": GenerateRequest, "cancel": CancelRequest, "status": StatusRequest, "replaced": ReplacedRequest,
}  # fmt: skip


def parse_request(message: Any) -> Request:
    """Check a client's message. Raises InvalidRequest with the field, its value and the expectation."""
    if not isinstance(message, dict):
        raise InvalidRequest(f"expected a map with the key 'op', got {shown(message)}")
    op = message.get("op")
    model = _REQUESTS.get(op) if isinstance(op, str) else None
    if model is None:
        raise InvalidRequest(f"op: expected one of {', '.join(_REQUESTS)}, got {shown(op)}")
    try:
        return model.model_validate(message)  # type: ignore[return-value]
    except ValidationError as error:
        raise InvalidRequest(describe(error)) from None


CHUNK = TypeAdapter(Chunk)
"""Reads a chunk."""


def pack(message: BaseModel | Chunk | dict[str, Any]) -> bytes:
    """Message as msgpack bytes; fields that are None are left out."""
    if isinstance(message, Chunk):
        message = CHUNK.dump_python(message, exclude_none=True)
    elif isinstance(message, BaseModel):
        message = message.model_dump(exclude_none=True)
    return msgpack.packb(message)


def unpack(data: bytes) -> Any:
    """Inverse of `pack`. Raises InvalidRequest if the bytes are not one msgpack value."""
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise InvalidRequest(f"not a msgpack message: {error}") from None
