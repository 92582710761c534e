"""The daemon that owns the engine worker, Triton, its guard and the front end `/v1`: starts them, restarts what dies,
ends them.

`python -m redraft.serving.supervisor RUN_DIR`, with settings.json in the run directory; started by `redraft serve`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import psutil

from redraft import logs
from redraft.serving import ranks, tritonserver
from redraft.serving.child import Child
from redraft.serving.engine_worker import END_S, Swap, engine_worker
from redraft.serving.listeners import FRONT_END_DRAIN_S, START_S, Watched, front_end, guard
from redraft.serving.processes import ServingError, end_processes, is_alive, owned_processes, remove_shared_memory
from redraft.serving.pulse import Pulse
from redraft.serving.rundir import Phase, RunDir, State, cannot_write, hold, point
from redraft.serving.settings import ServeSettings
from redraft.worker.client import WorkerClient, WorkerError

TRITON_START_S, FIRST_REQUEST_S, RESTARTED_REQUEST_S = 60.0, 120.0, 10.0
TICK_S, PING_S, PROBE_S = 0.1, 5.0, 2.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAUNCHER_END_S = 5.0
"""The launcher of ranks that have ended may take so long to say how."""
_asked_again = False

log = logging.getLogger("redraft.supervisor")


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived."""


class Supervisor:
    """One service: worker, Triton server, its guard, /v1 front end, and the state file that says how they are."""

    def __init__(self, run_dir: RunDir, settings: ServeSettings):
        self._run_dir, self._settings = run_dir, settings
        self._state = State(settings=settings, supervisor_pid=os.getpid())
        self._client = WorkerClient(run_dir.socket)
        self._untuned: list[str] = []
        self._server: list[psutil.Process] = []
        self._saved = True
        installation = tritonserver.TritonInstallation()
        tritonserver.prepare(installation, run_dir, settings)
        point(run_dir.socket, run_dir.worker_socket(0))
        point(run_dir.bundle, settings.bundle)
        for old in (run_dir.pipe, run_dir.swap_order, run_dir.stopping):
            old.unlink(missing_ok=True)
        os.mkfifo(run_dir.pipe)
        self._pipe = os.open(run_dir.pipe, os.O_RDWR)  # it closes with this process: the models end with it
        self._ranks: dict[int, psutil.Process] = {}
        self._worker_ends_by: float | None = None
        """When a worker that somebody else has asked to end must have ended."""
        self._worker = engine_worker(run_dir, settings)
        self._swap: Swap | None = None
        self._swaps = 0
        self._triton = tritonserver.server(installation, run_dir)
        self._guard = guard(run_dir, settings)
        self._openai = front_end(run_dir, settings) if settings.openai_port else None
        self._listeners: list[Watched] = [self._guard, *filter(None, [self._openai])]
        self._worker_pulse = Pulse(self._worker_answers, PING_S)
        self._triton_pulse = Pulse(self._triton_answers, PROBE_S)
        self._health_pulse = Pulse(self._health_is_true, PING_S)

    def run(self) -> NoReturn:
        """Start everything, then watch until StopRequested. Raises ServingError if the start fails."""
        tritonserver.remove_memory_after(self._run_dir)
        self._say("starting", f"loading the bundle {self._settings.bundle}")
        self._start_worker()
        for listener in self._listeners:
            listener.start()
        self._wait(self._worker, self._settings.start_timeout_s, self._worker_pulse)
        self._set_worker_up(True)
        self._say("starting", "loading Triton's models")
        self._start_triton()
        self._wait(self._triton, TRITON_START_S, self._triton_pulse)
        self._set_triton_up()
        for listener in self._listeners:
            self._wait(listener.child, START_S, listener.pulse)
            listener.child.up = True
        self._say("starting", "sending the first requests")
        try:
            tritonserver.send_first_requests(self._run_dir.http_socket, FIRST_REQUEST_S)
        except ServingError:
            if self._worker.ends_within(1.0):
                raise ServingError(self._worker.death) from None
            raise
        self._say("ready")
        while True:
            time.sleep(TICK_S)
            self._watch_triton()
            self._watch_worker()
            self._watch_swap()
            for event in filter(None, [listener.watch() for listener in self._listeners]):
                self._say("degraded", event)
            if self._state.phase == "degraded" and self._all_up():
                self._say("ready")
            if not self._saved:
                self._save()

    def _all_up(self) -> bool:
        listening = all(listener.child.up for listener in self._listeners)
        return self._worker.up and self._triton.up and listening and self._health_pulse.answered

    def shut_down(self, error: str = "") -> None:
        """End the worker with its last request, then the server, then whatever they left."""
        _expect_another_signal()
        with contextlib.suppress(OSError):  # a full disk: clients are then told that parts restart
            self._run_dir.stopping.touch()
        self._say("stopping", "no new requests, running ones end", error=error)
        self._client.close()
        if self._swap and not self._swap.serves:
            self._update(swap=self._swap.end("the service was stopped"))
        if self._worker.up:
            self._worker.up = False
            self._health_pulse.reset()
            self._drain()
        if self._swap and self._swap.serves:
            self._update(swap=self._swap.end())
        self._worker.end(grace=END_S)
        self._triton.end(grace=tritonserver.EXIT_TIMEOUT_S + 3)
        for listener in self._listeners:
            listener.child.end(grace=FRONT_END_DRAIN_S + 1)
        end_processes(owned_processes(self._run_dir.path), grace=0)
        remove_shared_memory(self._run_dir.path)
        self._run_dir.remove_sockets()
        self._say("failed" if error else "stopped", error=error)

    def _drain(self) -> None:
        """Have the worker end with its last request. A second signal cuts that short."""
        deadline = time.monotonic() + self._settings.drain_s
        self._worker.terminate()
        while not (_asked_again or time.monotonic() > deadline):
            if not self._worker.alive and (self._swap is None or self._swap.over):
                return
            time.sleep(TICK_S)

    def _watch_swap(self) -> None:
        swap = self._swap
        if swap is None:
            if order := self._run_dir.take_order():
                self._swaps += 1
                self._swap = Swap(self._run_dir, self._settings, order, self._swaps)
                self._say_swap(self._swap)
        elif swap.ready:
            if worker := swap.change_places(self._worker, self._client):
                worker.up = True  # before its health may be asked for
                self._worker, self._settings, self._untuned = worker, swap.settings, swap.untuned
                self._worker_ends_by = None
                self._set_worker_up(True)
                self._say_swap(swap)
        elif swap.over or swap.failure:
            swap.end()
            self._swap = None
            self._say_swap(swap)

    def _say_swap(self, swap: Swap) -> None:
        log.info("swap to %s: %s %s", swap.state.order.bundle, swap.state.phase, swap.state.error)
        self._update(swap=swap.state, settings=self._settings)
        self._say(self._state.phase, self._state.detail)

    def _watch_worker(self) -> None:
        if self._worker.alive and (fallen := ranks.fallen(self._ranks)):
            self._end_other_ranks(fallen)
        if not self._worker.alive:
            if self._worker.up:
                self._set_worker_up(False)
                self._report(ranks.death([], self._worker.log, self._state.rank_pids))
            if self._worker.restart_due():
                self._start_worker()
                self._say("degraded", "the engine worker is starting again")
        elif self._worker_ends_by is not None:
            if self._worker.up:
                self._set_worker_up(False, "the engine worker was asked to end, and restarts after its last request")
            if time.monotonic() > self._worker_ends_by:
                self._worker.end(grace=0)
        elif not self._worker.up:
            if self._worker_pulse.answered:
                self._set_worker_up(True)
            elif self._worker.age > self._settings.start_timeout_s:
                self._worker.end(grace=0)
        elif hung := self._worker.hung(self._worker_pulse.silence, self._settings.silence_s, self._ranks.values()):
            log.error("the engine worker %s: killing it", hung)
            stopped = dict.fromkeys(ranks.stopped(self._ranks), "is stopped")
            self._worker.end(grace=0)
            self._set_worker_up(False, f"the engine worker {hung} and is restarting")
            self._report(stopped)

    def _find_ranks(self) -> None:
        self._ranks = ranks.ranks_of(self._worker.processes())
        self._update(rank_pids={rank: process.pid for rank, process in self._ranks.items()})

    def _end_other_ranks(self, fallen: list[int]) -> None:
        """End the ranks that may wait for the fallen ones for ever, and have the launcher say how these ended. That of
        one machine sleeps twice for a second before it does; each signal ends a sleep."""
        end_processes([process for rank, process in self._ranks.items() if rank not in fallen], grace=0)
        self._set_worker_up(False)
        deadline = time.monotonic() + LAUNCHER_END_S
        while not self._worker.ends_within(TICK_S) and time.monotonic() < deadline:
            if not self._settings.hostfile:
                os.kill(self._worker.pid, signal.SIGINT)
        self._worker.end(grace=0)
        self._report(ranks.death(fallen, self._worker.log, self._state.rank_pids))

    def _report(self, ends: Mapping[int, str]) -> None:
        """Ranks failed: say it, and keep it in the state."""
        self._ranks = {}
        if not ends:
            return
        text = ranks.describe(ends, self._state.rank_pids)
        counts = self._state.rank_failures
        self._update(last_failure=text, rank_failures=counts | {rank: counts.get(rank, 0) + 1 for rank in ends})
        self._say("degraded", f"{text}; the engine worker is restarting")

    def _worker_answers(self) -> bool:
        """Whether the worker is ready and, before it counts as up again, whether Triton's models reach it."""
        try:
            status = self._client.status(self._settings.silence_s / 2)
            self._untuned = status.untuned
            if not status.ready and self._worker_ends_by is None:
                self._worker_ends_by = time.monotonic() + self._settings.drain_s + END_S
            if status.ready and self._triton.up and not self._worker.up:
                tritonserver.send_first_requests(self._run_dir.http_socket, RESTARTED_REQUEST_S)
            return status.ready
        except WorkerError:
            return False
        except ServingError as error:
            log.info("not yet ready: %s", error)
            return False

    def _triton_answers(self) -> bool:
        return tritonserver.models_live(self._run_dir.http_socket, self._settings.triton_silence_s / 2)

    def _health_is_true(self) -> bool:
        """Have Triton's health say how the worker is. Returns whether it does."""
        try:
            return self._triton.up and tritonserver.show_worker(self._run_dir, self._worker.up)
        except OSError as error:
            log.error("cannot tell Triton how the engine worker is: %s", error)
            return False

    def _start_worker(self) -> None:
        self._worker_ends_by = None
        self._worker.start()
        self._worker_pulse.reset()

    def _set_worker_up(self, up: bool, why: str = "the engine worker died and is restarting") -> None:
        self._worker.up = up
        self._worker_pulse.reset()
        self._health_pulse.reset()
        if up:
            self._find_ranks()
            self._update(untuned=self._untuned)
        else:
            self._say("degraded", why)

    def _start_triton(self) -> None:
        remove_shared_memory(self._run_dir.path)
        tritonserver.check_shared_memory()
        tritonserver.clear(self._run_dir)
        self._triton.start()
        self._triton_pulse.reset()

    def _set_triton_up(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self._triton.pid)
            self._server = [server, *server.children()]
        self._triton.up = True
        self._health_pulse.reset()

    def _watch_triton(self) -> None:
        alive = self._triton.alive
        if self._triton.up:
            whole = alive and all(is_alive(process) for process in self._server)
            limit = self._settings.triton_silence_s
            what = self._triton.hung(self._triton_pulse.silence, limit, self._server) if whole else "died"
            if not what:
                return
            self._triton.up = False
            self._say("degraded", f"the Triton server or one of its model processes {what} and is restarting")
            self._triton.end(grace=0)
        elif not alive:
            if self._triton.restart_due() and self._worker.up:
                try:
                    self._start_triton()
                except ServingError as error:  # as soon as there is room
                    if str(error) != self._state.detail:
                        self._say("degraded", str(error))
        elif self._triton_pulse.answered:
            self._set_triton_up()
        elif self._triton.age > TRITON_START_S:
            log.error("%s was not ready within %.0f s", self._triton.name, TRITON_START_S)
            self._triton.end(grace=0)

    def _wait(self, child: Child, timeout: float, pulse: Pulse) -> None:
        begun = child.age
        while not pulse.answered:
            if not child.alive:
                raise ServingError(child.death)
            if child.age - begun > timeout:
                longer = "; --start-timeout-s gives it more time" if child is self._worker else ""
                raise ServingError(f"{child.name} was not ready within {timeout:.0f} s{longer}; {child.log_end}")
            time.sleep(TICK_S)

    def _say(self, phase: Phase, detail: str = "", error: str = "") -> None:
        """Change the state and write it. Raises ServingError if that fails while `redraft serve` waits for it."""
        awaited = self._state.phase == "starting" and phase in ("starting", "ready")
        self._update(
            phase=phase,
            detail=detail,
            error=error,
            worker_pid=self._worker.pid,
            triton_pid=self._triton.pid,
            worker_restarts=max(self._worker.restarts, 0),
            triton_restarts=max(self._triton.restarts, 0),
            guard_pid=self._guard.child.pid,
            guard_restarts=max(self._guard.child.restarts, 0),
            openai_pid=self._openai.child.pid if self._openai else 0,
            openai_restarts=max(self._openai.child.restarts, 0) if self._openai else 0,
        )
        log.info("%s %s%s", phase, detail, error)
        self._save(awaited)

    def _save(self, awaited: bool = False) -> None:
        """Write the state file. Where that fails and nobody waits for it, it is tried again."""
        try:
            self._run_dir.write_state(self._state)
            self._saved = True
        except OSError as failure:
            error = cannot_write(self._run_dir.state_file, failure)
            if awaited:
                raise error from None
            if self._saved:
                log.error("%s", error)
            self._saved = False

    def _update(self, **fields: Any) -> None:
        self._state = self._state.model_copy(update=fields)


def _request_stop(*_: object) -> None:
    _expect_another_signal()
    raise StopRequested


def _expect_another_signal() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, _ask_again)


def _ask_again(*_: object) -> None:
    global _asked_again
    _asked_again = True


def main(path: str) -> int:
    """Run the supervisor of a run directory. Returns the exit status."""
    run_dir = RunDir(Path(path))
    settings = ServeSettings.model_validate_json(run_dir.settings_file.read_text())
    os.environ[logs.FORMAT_VARIABLE] = settings.log_format
    logs.configure()
    with run_dir.lock_file.open("w") as lock:
        hold(lock)
        for number in STOP_SIGNALS:
            signal.signal(number, _request_stop)
        try:
            supervisor = Supervisor(run_dir, settings)
        except (ServingError, OSError) as error:
            run_dir.write_state(State(settings=settings, phase="failed", error=str(error)))
            return 1
        try:
            supervisor.run()
        except StopRequested:
            supervisor.shut_down()
            return 0
        except ServingError as error:
            supervisor.shut_down(str(error))
            return 1
        except BaseException as error:
            log.exception("the supervisor failed")
            supervisor.shut_down(f"the supervisor failed: {error!r}")
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
