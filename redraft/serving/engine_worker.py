"""The engine worker's process as the supervisor starts it, and a second one that takes its place."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from redraft.bundle.config import bundle_ranks
from redraft.request import GenerateRequest
from redraft.serving import ranks
from redraft.serving.child import Child
from redraft.serving.processes import ServingError
from redraft.serving.rundir import RunDir, SwapOrder, SwapState, point
from redraft.serving.settings import ServeSettings, handed_on
from redraft.worker.client import WorkerClient, WorkerError

WORKER_PART = "worker-"
"""How the names of the parts begin that the workers are."""
MAX_DELAY_S = 30.0
"""A worker that ends again and again is broken."""
END_S = 5.0
"""A worker without requests may take so long to end."""
LAST_WORDS_S = 1.0
"""A worker that dies takes so long to be seen dead after its connection."""
ASK_S = 0.2
FIRST_TOKENS = 4
REPOSITORY = Path(__file__).resolve().parents[2]


def engine_worker(run_dir: RunDir, settings: ServeSettings, number: int = 0) -> Child:
    """The process that serves a bundle at the socket of this number. Raises ServingError where it needs MPI or a
    hostfile that is not there."""
    socket = run_dir.worker_socket(number)
    command = [*settings.worker_command, "--bundle", str(settings.bundle), "--socket", str(socket)]
    return Child(
        run_dir,
        f"{WORKER_PART}{number}",
        "the engine worker",
        ranks.launch_command(command, bundle_ranks(settings.bundle), settings.hostfile),
        run_dir.worker_log,
        handed_on(settings),
        REPOSITORY,
        MAX_DELAY_S,
    )


class Swap:
    """A bundle's worker that loads beside the one that serves, and that one while it ends, once they have changed
    places."""

    def __init__(self, run_dir: RunDir, settings: ServeSettings, order: SwapOrder, number: int):
        self.state = SwapState(order=order)
        self.settings = settings.model_copy(update={"bundle": order.bundle})
        self.untuned: list[str] = []
        """Methods of the new bundle that are not tuned."""
        self._run_dir, self._socket = run_dir, run_dir.worker_socket(number)
        self._newcomer: Child | None = None
        self._predecessor: Child | None = None
        self._ends_by = 0.0
        self._answered = False
        self._error = ""
        self._ended = threading.Event()
        try:
            self._newcomer = engine_worker(run_dir, self.settings, number)
            self._newcomer.start()
        except (ServingError, OSError) as error:
            self._error = str(error)
        else:
            threading.Thread(target=self._ask, name="redraft-swap", daemon=True).start()

    @property
    def ready(self) -> bool:
        """Whether the new worker has answered a request, is alive and waits for its place."""
        alive = self._newcomer is not None and self._newcomer.alive
        return self._answered and alive and not (self.serves or self._error)

    @property
    def serves(self) -> bool:
        """Whether the new worker has its place."""
        return self._predecessor is not None

    @property
    def over(self) -> bool:
        """Whether it has been ended, or the old worker has, or had enough time."""
        old = self._predecessor
        return self._ended.is_set() or (old is not None and (not old.alive or time.monotonic() > self._ends_by))

    @property
    def failure(self) -> str:
        """Why the new worker will not serve, "" as long as it may."""
        child, limit = self._newcomer, self.settings.start_timeout_s
        if self.serves or child is None:
            return self._error
        if not child.alive or (self._error and child.ends_within(LAST_WORDS_S)):
            return child.death
        if not (self._answered or self._error) and child.age > limit:
            return f"{child.name} was not ready within {limit:.0f} s; {child.log_end}"
        return self._error

    def change_places(self, worker: Child, client: WorkerClient) -> Child | None:
        """Send new requests to the new worker, which is returned. The old one has the time of a drain to end with its
        last request. None where the run directory cannot be read or written: the swap has failed."""
        run_dir, newcomer, before = self._run_dir, self._newcomer, None
        assert newcomer is not None
        try:
            before = run_dir.bundle.readlink()
            point(run_dir.bundle, self.settings.bundle)
            point(run_dir.socket, self._socket)
        except OSError as error:
            with contextlib.suppress(OSError):
                if before is not None:
                    point(run_dir.bundle, before)
            self._error = f"cannot change the links in {run_dir.path}: {error.strerror}"
            return None
        newcomer.restarts += worker.restarts
        self._predecessor, self._ends_by = worker, time.monotonic()
        with contextlib.suppress(WorkerError):  # it is not there
            client.replaced(self.settings.drain_s)
            self._ends_by += self.settings.drain_s + END_S
        self.state = self.state.model_copy(update={"phase": "draining"})
        return newcomer

    def end(self, why: str = "") -> SwapState:
        """End the worker that does not serve, and return how the swap went. `why` is the error where nothing else has
        failed."""
        error = self.failure or why
        self._ended.set()
        if worker := self._predecessor or self._newcomer:
            worker.end(grace=0)
        self.state = self.state.model_copy(update={"phase": "failed" if error else "done", "error": error})
        return self.state

    def _ask(self) -> None:
        try:
            with WorkerClient(self._socket) as client:
                while not client.wait_connected(ASK_S):
                    if self._ended.is_set():
                        return
                request = GenerateRequest(id=client.new_id(), input_ids=[0], max_tokens=FIRST_TOKENS)
                client.complete(request, timeout=self.settings.start_timeout_s)
                self.untuned = client.status().untuned
        except WorkerError as error:
            self._error = f"the first request to the new bundle failed: {error}"
        else:
            self._answered = True
