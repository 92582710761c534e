"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with a status that says who is to act."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from redraft.errors import Code, RequestError, place
from redraft.request import FIELDS, GenerateRequest, clipped, describe

CLIENTS_FIELDS = {
    **{name: name for name in GenerateRequest.model_fields},
    **{field.path: field.v1 or field.name for field in FIELDS},
}
"""The fields of a worker's request, and their names in `/v1`: some can only be checked to the end by the worker."""
UNSERVED = "unserved"
"""Pydantic's type of an error whose context has a field that is not served and what to say of it."""


class ApiError(RequestError):
    """A request that cannot be answered, with all that its answer needs; `param` is the field at fault."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: Code = Code.INVALID_REQUEST,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message, code)
        self.param = param
        self.headers = {**code.headers, **(headers or {})}

    @property
    def status(self) -> int:
        """HTTP's status."""
        return self.code.http

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        error = {"message": self.message, "type": self.code.type, "param": self.param, "code": self.code}
        return {"error": error}


def not_served(param: str, text: str) -> ApiError:
    """A feature that is asked for and that this server does not have."""
    return ApiError(f"{param}: {text}", param, Code.UNSUPPORTED)


def internal() -> ApiError:
    """A failure of this server; its log has the cause."""
    return ApiError("internal error: the server's log has the cause", code=Code.INTERNAL)


def in_client_terms(error: RequestError, fields: Mapping[str, str] = CLIENTS_FIELDS) -> ApiError:
    """A request's error with the client's name of the field that its text begins with; `fields` has them by the
    worker's names."""
    name, _, rest = error.message.partition(":")
    param = fields.get(name)
    return ApiError(f"{param}:{rest}" if param else error.message, param, error.code)


def invalid_body(error: ValidationError) -> ApiError:
    """What pydantic found wrong with a body."""
    first = error.errors(include_url=False)[0]
    if first["type"] == UNSERVED:
        return not_served(place((*first["loc"], first["ctx"]["field"])), first["ctx"]["text"])
    if first["type"] == "json_invalid":
        return ApiError(f"the body is not valid JSON: {clipped(first['msg'].removeprefix('Invalid JSON: '), 200)}")
    if first["type"] == "model_type" and not first["loc"]:
        kind = type(first["input"]).__name__
        return ApiError(f"the body is not a JSON object but {kind}: expected an object")
    text = describe(error)
    named, colon, _ = text.partition(":")  # what is wrong with two fields together names one of them
    param = place(first["loc"]) or (named if colon else None)
    return ApiError(clipped(text, 1000), param and clipped(param, 200))


def of_worker(error: RequestError, fields: Mapping[str, str] = CLIENTS_FIELDS) -> ApiError:
    """The answer to a request that the worker refused or lost; `fields` as in `in_client_terms`."""
    # What failed inside of the worker is for the operator, who finds it in the log, and may hold parts of a prompt.
    return internal() if error.code is Code.INTERNAL else in_client_terms(error, fields)
