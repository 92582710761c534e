"""What every model needs of Triton's Python backend. Imported inside it only."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from redraft.errors import Code
from redraft.serving.triton.messages import QUEUE_FULL, with_code
from redraft.worker import protocol

_STATUSES = {"INVALID_ARGUMENT": "INVALID_ARG", "UNAVAILABLE": "UNAVAILABLE", "CANCELLED": "CANCELLED"}
"""Triton's names of gRPC's statuses; all others are INTERNAL to it. They are names, since Triton adds its part of
pb_utils only after this module has been imported."""


def error_response(code: Code, text: str) -> Any:
    """A response with an error."""
    if code is Code.OVERLOADED:
        text = f"{text} ({QUEUE_FULL})"
    status = getattr(pb_utils.TritonError, _STATUSES.get(code.grpc, "INTERNAL"))
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(with_code(code, text), status))


def inputs(request: Any) -> dict[str, Any]:
    """A request's input arrays by name, batch dimension included."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def end_with_supervisor() -> None:
    """Have the kernel kill this process when the supervisor, which holds a pipe's other end, has gone. A thread could
    not: a call of Triton's metrics waits for the dead server with the interpreter locked. Parents do not count either:
    the server's thread that started this process may end before it."""
    pipe = Path(os.environ["REDRAFT_WORKER_SOCKET"]).with_name(protocol.SUPERVISOR_PIPE)
    if pipe.exists():
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
