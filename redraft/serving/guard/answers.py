"""Triton's errors. Over HTTP it answers 400 or 500 to most, so their texts decide who is to act."""

from __future__ import annotations

from redraft.serving.guard.refusal import AWAY, EXPIRED, INTERNAL, INVALID, OVERLOADED, TOO_LARGE, Refusal
from redraft.serving.triton.messages import INTERNAL_ERROR, QUEUE_FULL, TIMED_OUT

_STATUSES = (
    (QUEUE_FULL, OVERLOADED),
    ("the engine worker went away", AWAY),
    ("the engine worker is ", AWAY),  # restarting, or shutting down
    (TIMED_OUT, EXPIRED),
    (INTERNAL_ERROR, INTERNAL),
    ("the engine worker failed", INTERNAL),
    ("Failed to increase the shared memory", TOO_LARGE),
    ("Unable to parse", INVALID),
    ("failed to parse the request JSON", INVALID),  # a number too large for a double
    ("attempt to access JSON", INVALID),
)


def failure(text: str, status: int) -> Refusal:
    """An error of Triton that came with an HTTP status, with the status that it should have."""
    return Refusal(next((right for part, right in _STATUSES if part in text), status), text)
