"""Why requests fail, as codes with their statuses; errors of bundles, and the remedies that messages name."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path


class Code(StrEnum):
    """Why a request has no result. The code goes with an error from where it is raised to the client.

    Each member is a row: the code's name on the wire and in `/v1`, HTTP's status, gRPC's, and what happened.
    """

    INVALID_REQUEST = "invalid_request", 400, "INVALID_ARGUMENT", "a field, its value or the body cannot be used"
    UNSUPPORTED = "unsupported_parameter", 400, "INVALID_ARGUMENT", "a feature that this server does not have"
    CONTEXT_LENGTH = "context_length_exceeded", 400, "INVALID_ARGUMENT", "prompt and answer do not fit the context"
    INVALID_API_KEY = "invalid_api_key", 401, "UNAUTHENTICATED", "the server's key is missing or wrong"
    HOST_NOT_ALLOWED = "host_not_allowed", 403, "PERMISSION_DENIED", "the server is not reached by this name"
    ORIGIN_NOT_ALLOWED = "origin_not_allowed", 403, "PERMISSION_DENIED", "a web page of another site asks"
    CLOSED = "closed", 403, "PERMISSION_DENIED", "a part of Triton's protocol that is not served"
    NOT_FOUND = "not_found", 404, "NOT_FOUND", "there is no such path"
    MODEL_NOT_FOUND = "model_not_found", 404, "NOT_FOUND", "there is no such model or version"
    METHOD_NOT_ALLOWED = "method_not_allowed", 405, "UNIMPLEMENTED", "HTTP's method is not for this path"
    BODY_TIMEOUT = "body_timeout", 408, "DEADLINE_EXCEEDED", "the body or message did not arrive in time"
    TOO_LARGE = "too_large", 413, "RESOURCE_EXHAUSTED", "the body, or a part of it, is larger than is taken"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type", 415, "INVALID_ARGUMENT", "the body is not plain JSON"
    OVERLOADED = "rate_limit_exceeded", 429, "UNAVAILABLE", "too much work at the moment"
    HEADERS_TOO_LARGE = "headers_too_large", 431, "RESOURCE_EXHAUSTED", "the headers are larger than is taken"
    CANCELLED = "cancelled", 499, "CANCELLED", "the client cancelled the request"
    INTERNAL = "internal_error", 500, "INTERNAL", "the server failed; its log has the cause"
    NOT_IMPLEMENTED = "not_implemented", 501, "UNIMPLEMENTED", "Triton does not do this with models that stream"
    UNAVAILABLE = "service_unavailable", 503, "UNAVAILABLE", "the worker or Triton is restarting, or shutting down"
    DEADLINE = "deadline_exceeded", 504, "UNAVAILABLE", "the request's own timeout passed"  # gRPC: as Triton has it

    http: int
    grpc: str
    meaning: str

    def __new__(cls, name: str, http: int = 0, grpc: str = "", meaning: str = "") -> Code:
        """Make a member of its row."""
        code = str.__new__(cls, name)
        code._value_, code.http, code.grpc, code.meaning = name, http, grpc, meaning
        return code

    @classmethod
    def _missing_(cls, value: object) -> Code:
        return cls.INTERNAL  # the code of a worker of another version, during a swap

    @classmethod
    def of_http(cls, status: int) -> Code:
        """The code of an error of a library or of Triton, which has HTTP's status only."""
        fallback = cls.INTERNAL if status >= 500 else cls.INVALID_REQUEST
        return next((code for code in cls if code.http == status), fallback)

    @property
    def type(self) -> str:
        """The `type` of OpenAI's errors."""
        if self is Code.OVERLOADED:
            return "rate_limit_error"
        return "server_error" if self.http >= 500 else "invalid_request_error"

    @property
    def retry_after_s(self) -> int | None:
        """Seconds of HTTP's Retry-After; None where to try again does not help."""
        return {Code.OVERLOADED: 1, Code.UNAVAILABLE: 5}.get(self)

    @property
    def headers(self) -> dict[str, str]:
        """HTTP's headers for the error."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def reason(error: Exception) -> str:
    """What is wrong, in a line: of a file its path and why it cannot be used, without Python's numbers."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"cannot use {error.filename}: {error.strerror}"
    return str(error)


def why_no_folder(path: Path) -> str | None:
    """Why a path is no folder, and none can be made there; None where it is one, or seems to have room for one."""
    try:
        if path.is_symlink() and not path.exists():
            return f"{path} is a link that leads nowhere"
        above = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    except OSError as error:
        return reason(error)
    return None if above.is_dir() else f"{above} is a file; expected a folder"


def read_text(path: Path, option: str) -> str:
    """The text of the file that an option names. Raises ValueError, which names both, where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{option} {path}: not a text file in UTF-8") from None


class RequestError(Exception):
    """A request that has no result."""

    def __init__(self, message: str, code: Code = Code.INVALID_REQUEST):
        super().__init__(message)
        self.message, self.code = message, code


def program(name: str) -> str:
    """A program of this environment by a path that works where the environment is not activated: relative below the
    working folder."""
    path = Path(sys.prefix, "bin", name)
    if not path.exists():
        return name
    with suppress(FileNotFoundError):  # a working folder that was deleted
        folder = Path.cwd()
        return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
    return str(path)


def install(extra: str) -> str:
    """The command that adds an extra of this package to its environment, be it from a wheel or a clone."""
    return f"{program('pip')} install 'redraft[{extra}]'"


def reinstall_torch() -> str:
    """The command that puts PyPI's torch, which has CUDA and NCCL, where another one is."""
    return f"{program('pip')} uninstall -y torch && {install('train')}"


class BundleError(RuntimeError):
    """A bundle that cannot be loaded; the message says why and what to rebuild."""


def how_to_rebuild(command: str = "") -> str:
    """The remedy for a bundle that cannot be used; `command` is the one of its manifest."""
    command = command or "redraft build"
    if not command.startswith("redraft "):  # what built it is gone since
        return f"rebuild it with `redraft build` and what these options asked for: {command}"
    # Manifests go to other machines, where the program has another path.
    return f"rebuild it with: {shlex.quote(program('redraft'))} {command.removeprefix('redraft ')}"


def place(location: tuple[int | str, ...]) -> str:
    """A field's place in a request as OpenAI writes it, such as `messages[0].content`; empty for the whole."""
    parts = (part for part in location if part != "[key]")
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
