"""The page of metrics that both ports have, `/v1`'s and Triton's: the engine's, and of the processes behind them."""

from __future__ import annotations

import json
from pathlib import Path

from redraft.learning.generations import Generation
from redraft.metrics import GENERATION, RANK_FAILURES, SERVICE, WORKER_RESTARTS, WORKER_UP, Metrics

STATE, BUNDLE = "state.json", "bundle"
"""The supervisor's file and its link to the worker's bundle, beside the worker's socket; a worker that was started by
hand has neither."""


def metrics_page(socket: Path, engine: str | None) -> bytes:
    """The metrics of a worker, which it has written itself, and what the supervisor has counted. None: the worker does
    not answer."""
    service = Metrics(SERVICE)
    service[WORKER_UP].set(engine is not None)
    if generation := Generation.of(socket.with_name(BUNDLE)):
        service[GENERATION].set(generation.number)
    try:
        state = json.loads(socket.with_name(STATE).read_bytes())
        service[WORKER_RESTARTS].set(int(state["worker_restarts"]))
        for rank, count in state["rank_failures"].items():
            service[RANK_FAILURES].labels(rank).set(int(count))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # none, or one of another version
    return service.page() + (engine or "").encode()
