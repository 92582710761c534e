"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with a status that says who is to act."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from redraft.errors import place
from redraft.request import FIELDS, GenerateRequest, clipped, describe
from redraft.worker.client import WorkerError
from redraft.worker.protocol import CANCELLED, INVALID, OVERLOADED, RESTARTING

OVERLOADED_RETRY_S, RESTARTING_RETRY_S = 1, 5
"""What Retry-After says where the queue is full, and where the worker is away."""
CLIENTS_FIELDS = {
    **{name: name for name in GenerateRequest.model_fields},
    **{field.path: field.v1 or field.name for field in FIELDS},
}
"""The fields of a worker's request, and their names in `/v1`: some can only be checked to the end by the worker."""
UNSERVED = "unserved"
"""Pydantic's type of an error whose context has a field that is not served and what to say of it."""
INVALID_TYPE, SERVER_TYPE = "invalid_request_error", "server_error"


class ApiError(Exception):
    """A request that cannot be answered, with all that its answer needs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = "rate_limit_error" if self.status == 429 else SERVER_TYPE if self.status >= 500 else INVALID_TYPE
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def not_served(param: str, text: str) -> ApiError:
    """A feature that is asked for and that this server does not have."""
    return ApiError(400, f"{param}: {text}", param, "unsupported_parameter")


def too_long(param: str, message: str) -> ApiError:
    """A prompt, or a prompt and its answer, that the context does not hold."""
    return ApiError(400, message, param, "context_length_exceeded")


def internal() -> ApiError:
    """A failure of this server; its log has the cause."""
    return ApiError(500, "internal error: the server's log has the cause", code="internal_error")


def invalid_request(text: str, fields: Mapping[str, str] = CLIENTS_FIELDS) -> ApiError:
    """What a worker's request may not say; its first word is the field, by the worker's name. `fields` are the names
    that the client knows."""
    name, _, rest = text.partition(":")
    param = fields.get(name)
    return ApiError(400, f"{param}:{rest}" if param else text, param)


def invalid_body(error: ValidationError) -> ApiError:
    """What pydantic found wrong with a body."""
    first = error.errors(include_url=False)[0]
    if first["type"] == UNSERVED:
        return not_served(place((*first["loc"], first["ctx"]["field"])), first["ctx"]["text"])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {clipped(first['msg'].removeprefix('Invalid JSON: '), 200)}")
    if first["type"] == "model_type" and not first["loc"]:
        kind = type(first["input"]).__name__
        return ApiError(400, f"the body is not a JSON object but {kind}: expected an object")
    text = describe(error)
    named, colon, _ = text.partition(":")  # what is wrong with two fields together names one of them
    param = place(first["loc"]) or (named if colon else None)
    return ApiError(400, clipped(text, 1000), param and clipped(param, 200))


def overloaded(text: str) -> ApiError:
    """The answer to a request too many."""
    return ApiError(429, text, code="rate_limit_exceeded", headers={"Retry-After": str(OVERLOADED_RETRY_S)})


def of_worker(error: WorkerError, fields: Mapping[str, str] = CLIENTS_FIELDS) -> ApiError:
    """The answer to a request that the worker refused or lost; `fields` as in `invalid_request`."""
    text = str(error)
    if error.code == INVALID:
        return invalid_request(text, fields)
    if error.code == OVERLOADED:
        return overloaded(text)
    if error.code in (RESTARTING, CANCELLED):
        return ApiError(503, text, code="service_unavailable", headers={"Retry-After": str(RESTARTING_RETRY_S)})
    return internal()
