"""The daemon that keeps up the parts of a service: the engine worker, Triton, its guard and the front end `/v1`. How a
part goes from state to state says `redraft.serving.child.Part`.

`python -m redraft.serving.supervisor RUN_DIR`, with settings.json in the run directory; started by `redraft serve`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from redraft import logs
from redraft.errors import reason
from redraft.learning.generations import note_served
from redraft.serving import tritonserver
from redraft.serving.child import Part
from redraft.serving.engine_worker import END_S, EngineWorker, Swap
from redraft.serving.listeners import FRONT_END_DRAIN_S, front_end, guard
from redraft.serving.processes import ServingError, end_processes, owned_processes, remove_shared_memory
from redraft.serving.pulse import Pulse
from redraft.serving.rundir import Phase, RunDir, State, cannot_write, hold, point
from redraft.serving.settings import ServeSettings
from redraft.serving.tritonserver import Triton
from redraft.worker.client import NOT_THERE, WorkerClient

FIRST_REQUEST_S, CONNECT_S = 120.0, 10.0
TICK_S, HEALTH_S = 0.1, 5.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_asked_again = False

log = logging.getLogger("redraft.supervisor")


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived."""


class Supervisor:
    """One service: its parts, the swap that goes on, and the state file that says how they are."""

    def __init__(self, run_dir: RunDir, settings: ServeSettings):
        self._run_dir, self._settings = run_dir, settings
        self._state = State(settings=settings, supervisor_pid=os.getpid())
        self._client = WorkerClient(run_dir.socket)
        self._saved = True
        self._swap: Swap | None = None
        self._swaps = 0
        installation = tritonserver.TritonInstallation()
        tritonserver.prepare(installation, run_dir, settings)
        point(run_dir.socket, run_dir.worker_socket(0))
        point(run_dir.bundle, settings.bundle)
        for old in (run_dir.pipe, run_dir.swap_order, run_dir.stopping, run_dir.open_http, run_dir.open_grpc):
            old.unlink(missing_ok=True)
        run_dir.starting.touch()
        os.mkfifo(run_dir.pipe)
        self._pipe = os.open(run_dir.pipe, os.O_RDWR)  # it closes with this process: the models end with it
        self._triton = Triton(installation, run_dir, settings.triton_silence_s, lambda: self._worker.up)
        self._worker = EngineWorker(run_dir, settings, self._client, self._triton)
        self._guard = guard(run_dir, settings)
        self._openai = front_end(run_dir, settings) if settings.openai_port else None
        self._listeners: list[Part] = [self._guard, *filter(None, [self._openai])]
        self._health_pulse = Pulse(self._health_is_true, HEALTH_S)

    def run(self) -> NoReturn:
        """Start everything, then watch until StopRequested. Raises ServingError if the start fails."""
        tritonserver.remove_memory_after(self._run_dir)
        self._say("starting", f"loading the bundle {self._settings.bundle}")
        parts: list[Part] = [self._worker, self._triton, *self._listeners]
        for part in parts:
            part.start()
        self._worker.wait(beside=parts)
        self._say("starting", "loading Triton's models")
        for part in (self._triton, *self._listeners):
            part.wait(beside=parts)
        self._health_pulse.reset()
        self._say("starting", "sending the first requests")
        self._send_first_requests()
        try:
            self._run_dir.open()
        except OSError as error:
            raise cannot_write(self._run_dir.open_http, error) from None
        self._say("ready")
        while True:
            time.sleep(TICK_S)
            self._watch()

    def _send_first_requests(self) -> None:
        """Raises ServingError where one fails. Triton's models, which may have been there before the worker, have
        CONNECT_S to find it."""
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return tritonserver.send_first_requests(self._run_dir.http_socket, FIRST_REQUEST_S)
            except ServingError as error:
                if NOT_THERE not in str(error) or time.monotonic() > deadline or not self._worker.child.alive:
                    if self._worker.child.ends_within(1.0):
                        raise ServingError(self._worker.child.death) from None
                    raise
            time.sleep(TICK_S)

    def _watch(self) -> None:
        """Look at everything once."""
        for part in (self._triton, self._worker, *self._listeners):
            was_up, restarts = part.up, part.child.restarts
            event = part.watch()
            if part.up != was_up and part not in self._listeners:
                self._health_pulse.reset()  # what Triton's health says is no longer true
            # A start that fails for want of room fails at each tick in the same words.
            if event and (self._state.phase, self._state.detail) != ("degraded", event):
                self._say("degraded", event)
            elif part.child.restarts != restarts:
                self._say(self._state.phase, self._state.detail)  # it has another process id
        self._watch_swap()
        if self._state.phase == "degraded" and self._all_up():
            self._say("ready")
        if not self._saved:
            self._save()

    def _all_up(self) -> bool:
        return all(part.up for part in (self._worker, self._triton, *self._listeners)) and self._health_pulse.answered

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
            self._worker.child.up = False
            self._health_pulse.reset()
            self._drain()
        if self._swap and self._swap.serves:
            self._update(swap=self._swap.end())
        self._worker.child.end(grace=END_S)
        self._triton.child.end(grace=tritonserver.EXIT_TIMEOUT_S + 3)
        for listener in self._listeners:
            listener.child.end(grace=FRONT_END_DRAIN_S + 1)
        end_processes(owned_processes(self._run_dir.path), grace=0)
        remove_shared_memory(self._run_dir.path)
        self._run_dir.remove_sockets()
        self._say("failed" if error else "stopped", error=error)

    def _drain(self) -> None:
        """Have the worker end with its last request. A second signal cuts that short."""
        deadline = time.monotonic() + self._settings.drain_s
        self._worker.child.terminate()
        while not (_asked_again or time.monotonic() > deadline):
            if not self._worker.child.alive and (self._swap is None or self._swap.over):
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
            if swap.change_places(self._worker, self._client):
                before = self._state.before
                self._update(before=before[:-1] if swap.state.order.back else [*before, self._settings.bundle])
                self._settings = swap.settings
                self._note_served()
                self._health_pulse.reset()
                self._say_swap(swap)
        elif swap.over or swap.failure:
            swap.end()
            self._swap = None
            self._say_swap(swap)

    def _note_served(self) -> None:
        """Have the next start draft as the bundle that is served now."""
        if self._settings.learn:
            try:
                note_served(self._settings.learn, self._settings.bundle)
            except OSError as error:
                log.error("the next start does not know of this swap: %s", reason(error))

    def _say_swap(self, swap: Swap) -> None:
        log.info("swap to %s: %s %s", swap.state.order.bundle, swap.state.phase, swap.state.error)
        self._update(swap=swap.state, settings=self._settings)
        self._say(self._state.phase, self._state.detail)

    def _health_is_true(self) -> bool:
        """Have Triton's health say how the worker is. Returns whether it does."""
        try:
            return self._triton.up and tritonserver.show_worker(self._run_dir, self._worker.up)
        except OSError as error:
            log.error("cannot tell Triton how the engine worker is: %s", error)
            return False

    def _say(self, phase: Phase, detail: str = "", error: str = "") -> None:
        """Change the state and write it. Raises ServingError if that fails while `redraft serve` waits for it."""
        awaited = self._state.phase == "starting" and phase in ("starting", "ready")
        worker = self._worker
        parts = {"worker": worker, "triton": self._triton, "guard": self._guard, "openai": self._openai}
        children = {name: part.child for name, part in parts.items() if part}
        self._update(
            phase=phase,
            detail=detail,
            error=error,
            rank_pids=worker.rank_pids,
            rank_failures=worker.rank_failures,
            last_failure=worker.last_failure,
            **{f"{name}_pid": child.pid for name, child in children.items()},
            **{f"{name}_restarts": max(child.restarts, 0) for name, child in children.items()},
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
