"""What both protocols refuse alike: Triton that does not answer, and too many bodies."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from redraft.errors import Code, RequestError
from redraft.serving.guard.limits import MAX_BODIES_BYTES, Room
from redraft.worker.protocol import STOPPING

TRITON_AWAY = "the Triton server is restarting or not running: try again shortly"
TRITON_SHUTTING_DOWN = "the Triton server is shutting down"


def triton_away(socket: Path) -> RequestError:
    """The error for a Triton that does not answer at its socket."""
    text = TRITON_SHUTTING_DOWN if socket.with_name(STOPPING).exists() else TRITON_AWAY
    return RequestError(text, Code.UNAVAILABLE)


def room_for_bodies() -> Room:
    """The room of all bodies over both protocols."""
    return Room(MAX_BODIES_BYTES, partial(RequestError, code=Code.OVERLOADED))
