"""The engine worker as the supervisor keeps it up, and a second one that takes its place."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping

import psutil

from redraft.bundle.folder import bundle_ranks
from redraft.home import SITE
from redraft.request import GenerateRequest
from redraft.serving import ranks
from redraft.serving.child import Child, Part
from redraft.serving.processes import WORKER_PART, ServingError, end_processes
from redraft.serving.rundir import RunDir, SwapOrder, SwapState, point
from redraft.serving.settings import ServeSettings, environment_of
from redraft.serving.tritonserver import send_first_requests
from redraft.worker.client import WorkerClient, WorkerError

MAX_DELAY_S = 30.0
"""A worker that ends again and again is broken."""
END_S = 5.0
"""A worker without requests may take so long to end."""
DEATH_S = 1.0
"""A worker whose connection has ended may take so long to be seen dead."""
ASK_S, PING_S = 0.2, 5.0
RESTARTED_REQUEST_S = 10.0
LAUNCHER_END_S = 5.0
"""The launcher of ranks that have ended may take so long to say how."""
FIRST_TOKENS = 4

log = logging.getLogger("redraft.supervisor")


def worker_process(run_dir: RunDir, settings: ServeSettings, number: int = 0) -> Child:
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
        environment_of(settings),
        SITE,
        MAX_DELAY_S,
    )


class EngineWorker(Part):
    """The worker that takes new requests, with all of its ranks. It comes up when the models of `triton`, if that is
    up, reach it."""

    start_remedy = "; --start-timeout-s gives it more time"

    def __init__(self, run_dir: RunDir, settings: ServeSettings, client: WorkerClient, triton: Part):
        self._run_dir, self._settings, self._client, self._triton = run_dir, settings, client, triton
        self.start_s, self.silence_s = settings.start_timeout_s, settings.silence_s
        self.rank_pids: dict[int, int] = {}
        self.rank_failures: dict[int, int] = {}
        self.last_failure = ""
        self._ranks: dict[int, psutil.Process] = {}
        self._fallen: list[int] = []
        """Ranks that have ended while their launcher has not said how."""
        self._ends_by: float | None = None
        """When a worker must have ended that somebody other than the supervisor has asked to end."""
        super().__init__(worker_process(run_dir, settings), self._is_ready, PING_S)  # it may ask at once

    def start(self) -> None:
        """Start the worker."""
        self._ends_by = None
        super().start()

    def replace(self, child: Child, settings: ServeSettings) -> None:
        """Be another worker, of another bundle, which is up."""
        child.up = True
        self.child, self._settings, self._ends_by = child, settings, None
        self._fallen = []  # they were ranks of the other worker
        self.pulse.reset()
        self._find_ranks()

    def watch(self) -> str:
        """Poll it once, as every part; and see to ranks that end without the others."""
        if not self.child.alive:
            return self._blame(self._fallen) if self._fallen else super().watch()
        if self._fallen:
            return self._await_launcher()
        if fallen := ranks.fallen(self._ranks):
            return self._end_other_ranks(fallen)
        return super().watch() if self._ends_by is None else self._watch_end(self._ends_by)

    def processes(self) -> list[psutil.Process]:
        return list(self._ranks.values())

    def bring_up(self) -> None:
        super().bring_up()
        self._find_ranks()

    def bring_down(self, failure: str) -> str:
        """Kill what is left of it, and say which ranks are to blame, where there are several."""
        if self.child.alive:
            ends = dict.fromkeys(ranks.stopped(self._ranks), "is stopped")  # no longer to be seen when it is killed
            event = super().bring_down(failure)
        else:
            event = super().bring_down(failure)
            ends = ranks.death([], self.child.log, self.rank_pids)
        self.pulse.reset()
        return self._count(ends) or event

    def _find_ranks(self) -> None:
        self._ranks = ranks.ranks_of(self.child.processes())
        self.rank_pids = {rank: process.pid for rank, process in self._ranks.items()}

    def _end_other_ranks(self, fallen: list[int]) -> str:
        """End the ranks that would wait for the fallen ones for ever."""
        self.child.up = False
        self._fallen, self._launcher_ends_by = fallen, time.monotonic() + LAUNCHER_END_S
        end_processes([process for rank, process in self._ranks.items() if rank not in fallen], grace=0)
        return f"{self.child.name} died and is restarting"

    def _await_launcher(self) -> str:
        """Let the launcher say how the ranks ended. Kill it where it takes too long."""
        if time.monotonic() > self._launcher_ends_by:
            self.child.end(grace=0)
        elif not self._settings.hostfile:
            # The launcher of one machine sleeps twice for a second before it says so. A signal ends a sleep.
            os.kill(self.child.pid, signal.SIGINT)
        return ""

    def _blame(self, fallen: list[int]) -> str:
        self.child.end(grace=0)
        return self._count(ranks.death(fallen, self.child.log, self.rank_pids))

    def _count(self, ends: Mapping[int, str]) -> str:
        """Count ranks that failed, by how they ended. Returns a line about them, "" for none."""
        self._ranks, self._fallen = {}, []
        if not ends:
            return ""
        self.last_failure = ranks.describe(ends, self.rank_pids)
        self.rank_failures = self.rank_failures | {rank: self.rank_failures.get(rank, 0) + 1 for rank in ends}
        return f"{self.last_failure}; {self.child.name} is restarting"

    def _watch_end(self, ends_by: float) -> str:
        """Watch one that ends with its last request: it is away, but does not hang."""
        if time.monotonic() > ends_by:
            self.child.end(grace=0)
        if not self.child.up:
            return ""
        self.child.up = False
        self.pulse.reset()
        return f"{self.child.name} was asked to end, and restarts after its last request"

    def _is_ready(self) -> bool:
        """Whether the worker is ready and, before it counts as up again, whether Triton's models reach it."""
        try:
            status = self._client.status(self.silence_s / 2)
            if not status.ready and self._ends_by is None:
                self._ends_by = time.monotonic() + self._settings.drain_s + END_S
            if status.ready and self._triton.up and not self.up:
                send_first_requests(self._run_dir.http_socket, RESTARTED_REQUEST_S)
            return status.ready
        except WorkerError:
            return False
        except ServingError as error:
            log.info("not yet ready: %s", error)
            return False


class Swap:
    """A bundle's worker that loads beside the one that serves, and that one while it ends, once they have changed
    places."""

    def __init__(self, run_dir: RunDir, settings: ServeSettings, order: SwapOrder, number: int):
        self.state = SwapState(order=order)
        self.settings = settings.model_copy(update={"bundle": order.bundle})
        self._run_dir, self._socket = run_dir, run_dir.worker_socket(number)
        self._newcomer: Child | None = None
        self._predecessor: Child | None = None
        self._ends_by = 0.0
        self._answered = False
        self._error = ""
        self._ended = threading.Event()
        try:
            self._newcomer = worker_process(run_dir, self.settings, number)
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
        if not child.alive or (self._error and child.ends_within(DEATH_S)):
            return child.death
        if not (self._answered or self._error) and child.age > limit:
            return f"{child.name} was not ready within {limit:.0f} s; {child.log_end}"
        return self._error

    def change_places(self, worker: EngineWorker, client: WorkerClient) -> bool:
        """Send new requests to the new worker. The old one has the time of a drain to end with its last request.
        Returns False where the run directory cannot be read or written: the swap has failed."""
        run_dir, newcomer, old, before = self._run_dir, self._newcomer, worker.child, None
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
            return False
        newcomer.restarts += old.restarts
        self._predecessor, self._ends_by = old, time.monotonic()
        with contextlib.suppress(WorkerError):  # it is not there
            client.replaced(self.settings.drain_s)
            self._ends_by += self.settings.drain_s + END_S
        self.state = self.state.model_copy(update={"phase": "draining"})
        worker.replace(newcomer, self.settings)
        return True

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
        except WorkerError as error:
            self._error = f"the first request to the new bundle failed: {error}"
        else:
            self._answered = True
