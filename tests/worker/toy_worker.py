"""A worker process on the toy engine: `python tests/worker/toy_worker.py SOCKET [seconds per step [to drain]]`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from redraft.bundle.method import MethodConfig
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Limits
from redraft.serving.settings import ServeSettings
from redraft.worker.client import WorkerClient, WorkerError
from redraft.worker.protocol import WorkerStatus
from redraft.worker.server import serve
from tests.toy_engine import ToyEngine, only, toy_codec

LIMITS = Limits(slots=2, max_len=256, max_tree=16, prefill_chunk=32, max_queue=2)


class SlowEngine(ToyEngine):
    def __init__(self, delay: float, **options):
        super().__init__(**options)
        self.delay = delay

    def execute(self, batch, samplers=None, meanwhile=None):
        time.sleep(self.delay)
        return super().execute(batch, samplers)


def toy_runtime(delay: float = 0.0, limits: Limits = LIMITS) -> Runtime:
    plan = MethodConfig(construction="best_first", ngram=True, tree_budget=8)
    engine = SlowEngine(delay, slots=limits.slots, max_tree=limits.max_tree)
    return Runtime(engine, toy_codec(), limits, engine.vocab_size, frozenset({0}), only(plan), name="toy")


def wait_for_worker(socket: str | Path, timeout: float) -> WorkerStatus:
    """Status of the worker at a socket once it answers; fails the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    with WorkerClient(socket) as client:
        while time.monotonic() < deadline:
            if client.wait_connected(0.2):
                with contextlib.suppress(WorkerError):
                    return client.status(timeout=2.0)
    raise TimeoutError(f"no engine worker answered at {socket} within {timeout} s")


if __name__ == "__main__":
    step_s, drain_s = (float(sys.argv[place]) if len(sys.argv) > place else 0.0 for place in (2, 3))
    serve(toy_runtime(step_s), Path(sys.argv[1]), os.getppid(), ServeSettings(drain_s=drain_s))
