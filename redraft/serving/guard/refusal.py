"""Requests that are refused, and the statuses that say so in both protocols."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import grpc

from redraft.serving.guard.limits import MAX_BODIES_BYTES, OVERLOAD_S, RESTART_S
from redraft.serving.room import Room
from redraft.worker.protocol import STOPPING

INVALID, CLOSED, UNKNOWN, WRONG_METHOD, SLOW, TOO_LARGE, WRONG_ENCODING = 400, 403, 404, 405, 408, 413, 415
OVERLOADED, INTERNAL, AWAY, EXPIRED = 429, 500, 503, 504
RETRY_AFTER = {OVERLOADED: OVERLOAD_S, AWAY: RESTART_S}
TRITON_AWAY = "the Triton server is restarting or not running: try again shortly"
TRITON_SHUTTING_DOWN = "the Triton server is shutting down"
_CODES = {
    CLOSED: grpc.StatusCode.PERMISSION_DENIED,
    UNKNOWN: grpc.StatusCode.NOT_FOUND,
    SLOW: grpc.StatusCode.DEADLINE_EXCEEDED,
    TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AWAY: grpc.StatusCode.UNAVAILABLE,
}


class Refusal(Exception):
    """A request that is not passed on; `status` is HTTP's."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status, self.message = status, message

    @property
    def code(self) -> grpc.StatusCode:
        """The status in gRPC."""
        return _CODES.get(self.status, grpc.StatusCode.INVALID_ARGUMENT)


def triton_away(socket: Path) -> Refusal:
    """Triton does not answer at its socket."""
    return Refusal(AWAY, TRITON_SHUTTING_DOWN if socket.with_name(STOPPING).exists() else TRITON_AWAY)


def room_for_bodies() -> Room:
    """The room of all bodies over both protocols."""
    return Room(MAX_BODIES_BYTES, partial(Refusal, OVERLOADED))
