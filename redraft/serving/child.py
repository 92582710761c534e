"""The parts of a service: processes that the supervisor starts, asks whether they answer, and starts again."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import subprocess
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import BinaryIO

import psutil

from redraft.bound import bound
from redraft.serving.processes import (
    OWNER_VARIABLE,
    PART_VARIABLE,
    ServingError,
    end_processes,
    is_alive,
    is_stopped,
    owned_processes,
)
from redraft.serving.pulse import Pulse
from redraft.serving.rundir import RunDir, tail

FIRST_DELAY_S = 0.2
STEADY_S = 5.0
"""What has been up for so long does not end again and again: its next delay is the first one."""
STOPPED_TICKS = 10
"""What a signal has stopped is hung when so many ticks of the supervisor in a row have found it so. These do not count
time in which the supervisor was stopped with it."""
POLL_S = 0.02
THREADS_END_S = 5.0
"""A killed process counts as ended when its first thread has, and holds its ports until its last one has."""

log = logging.getLogger("redraft.supervisor")


class Child:
    """One process and its log, and the processes that it starts in turn, which carry the mark `part`. It gets a session
    of its own, so that a terminal's Ctrl-C does not reach it, and ends with the calling thread. The delay before a
    restart doubles up to `max_delay` seconds. No file that they write, log and shared memory included, grows beyond
    `max_file_bytes`: they get an error instead. They may open as many files and connections as the hard limit says."""

    def __init__(
        self,
        run_dir: RunDir,
        part: str,
        name: str,
        command: list[str],
        log_file: Path,
        environment: dict[str, str],
        folder: Path,
        max_delay: float,
        max_file_bytes: int | None = None,
    ):
        self.name = name
        self.restarts = -1
        self._up_since: float | None = None
        self._command = command
        self._log_file = log_file
        self._run_dir, self._part = run_dir.path, part
        self._environment = environment | {OWNER_VARIABLE: str(run_dir.path), PART_VARIABLE: part}
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._log_start = 0
        self._delay, self._max_delay = FIRST_DELAY_S, max_delay
        self._restart_at: float | None = None
        self._stopped_ticks = 0

    @property
    def up(self) -> bool:
        """Whether it serves, as its owner says."""
        return self._up_since is not None

    @up.setter
    def up(self, up: bool) -> None:
        since, self._up_since = self._up_since, None
        if up:
            self._up_since = since or time.monotonic()
        elif since is not None and time.monotonic() - since > STEADY_S:
            self._delay = FIRST_DELAY_S

    @property
    def pid(self) -> int:
        """Process id, 0 before the first start."""
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def age(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._started

    @property
    def death(self) -> str:
        """How it ended, with the end of its log."""
        code = self._process.poll() if self._process else None
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended with status {code}"
        return f"{self.name} {how}; {self.log_end}"

    @property
    def log_end(self) -> str:
        """The end of its log."""
        return f"the end of {self._log_file}:\n{tail(self._log_file)}"

    @property
    def log(self) -> str:
        """What it has written since the last start."""
        with contextlib.suppress(FileNotFoundError), self._log_file.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")
        return ""

    def start(self) -> None:
        """Start it, its output appended to the log, or lost where that cannot be written. What the last one left is
        ended before. A log that has taken half of what it may is first moved to a file with `.1` after its name, which
        replaces an older one."""
        end_processes(self.processes(), grace=0)
        limit = self._max_file_bytes
        with contextlib.suppress(OSError):
            if limit is not None and self._log_file.stat().st_size > limit // 2:
                self._log_file.replace(f"{self._log_file}.1")
        with self._output() as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                bound(self._command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
                restore_signals=limit is None,  # Python ignores SIGXFSZ, which ends what grows a file too far
            )
            if limit is not None:
                resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (limit, limit))
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (most, most))
        self._started = time.monotonic()
        self._restart_at, self._stopped_ticks = None, 0
        self.restarts += 1
        log.info("%s started, pid %d", self.name, self.pid)

    def _output(self) -> BinaryIO:
        try:
            return self._log_file.open("ab")
        except OSError as error:
            log.error("cannot write %s: %s; what %s says is lost", self._log_file, error.strerror, self.name)
            return Path(os.devnull).open("ab")

    def restart_due(self) -> bool:
        """Whether a dead child is to be started now; the first call after a death chooses the delay."""
        if self._restart_at is None:
            log.warning("%s It starts again in %.1f s.", self.death, self._delay)
            self._restart_at = time.monotonic() + self._delay
            self._delay = min(2 * self._delay, self._max_delay)
        return time.monotonic() >= self._restart_at

    def hung(self, silence: float, limit: float, processes: Iterable[psutil.Process] = ()) -> str:
        """What shows that it hangs, "" for nothing: it has not answered for `limit` seconds or more, or one of
        `processes`, by default its own, is stopped (SIGSTOP). Called once a tick, while it is up."""
        if silence >= limit:
            return f"did not answer for {silence:.0f} s"
        with contextlib.suppress(psutil.NoSuchProcess):
            stopped = any(is_stopped(process) for process in processes or [psutil.Process(self.pid)])
            self._stopped_ticks = self._stopped_ticks + 1 if stopped else 0
        return "was stopped by a signal" if self._stopped_ticks >= STOPPED_TICKS else ""

    def terminate(self) -> None:
        """SIGTERM to it, if it runs."""
        if self._process is not None:
            self._process.terminate()

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends by itself in that time."""
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.alive

    def processes(self) -> list[psutil.Process]:
        """It and all that it started, as far as they run on this machine."""
        return owned_processes(self._run_dir, self._part)

    def end(self, grace: float) -> None:
        """SIGTERM to it, then, after `grace` seconds (at once if 0), SIGKILL to all that is left of its processes."""
        if grace and self.alive:
            end_processes([psutil.Process(self.pid)], grace)
        if self._process is not None:
            self._process.kill()  # in an exec it carries no mark yet, and `processes` misses it
        end_processes(self.processes(), grace=0)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(THREADS_END_S)


class Part:
    """A part of the service: a child, and the question whether it answers. `watch` takes it from state to state:

        down ──after a delay──► starting ──it answers──► up ──it died, hangs or was stopped──► down
                                   └──not within `start_s`──► killed, which makes it down

    The delay grows with each start in a row (`Child`). A part hangs where it has not answered for `silence_s`.
    """

    start_s = 60.0
    silence_s = 15.0
    start_remedy = ""
    """What a user can do about a start that took too long."""

    def __init__(self, child: Child, answers: Callable[[], bool], period: float):
        self.child = child
        self.pulse = Pulse(answers, period)

    @property
    def up(self) -> bool:
        return self.child.up

    def start(self) -> None:
        """Start the child. Raises ServingError where the machine has no room for it."""
        self.child.start()
        self.pulse.reset()

    def wait(self, beside: Collection[Part]) -> None:
        """Wait until it is up for the first time. Raises ServingError, with the end of a log, where it takes too long,
        or where it or a part that starts `beside` it ends."""
        child, begun = self.child, self.child.age  # it may have been started long before somebody waits
        while True:
            # Before the answer, which may be from before the end.
            for part in (self, *beside):
                if not part.child.alive:
                    raise ServingError(part.child.death)
            if self.pulse.answered:
                break
            if child.age - begun > self.start_s:
                late = f"{child.name} was not ready within {self.start_s:.0f} s{self.start_remedy}"
                raise ServingError(f"{late}; {child.log_end}")
            time.sleep(POLL_S)
        self.bring_up()

    def watch(self) -> str:
        """Poll it once and do what its state asks for. Returns what went wrong, "" for nothing new."""
        child = self.child
        if child.up:
            failure = self.failure()
            return failure and self.bring_down(failure)
        if not child.alive:
            if child.restart_due() and self.may_start():
                try:
                    self.start()
                except ServingError as error:  # tried again at the next poll, until there is room
                    return str(error)
        elif self.pulse.answered:
            self.bring_up()
        elif child.age > self.start_s:
            log.error("%s was not ready within %.0f s", child.name, self.start_s)
            child.end(grace=0)
        return ""

    def may_start(self) -> bool:
        """Whether the parts that it needs are up."""
        return True

    def processes(self) -> list[psutil.Process]:
        """Those beside the child without which it does not serve."""
        return []

    def failure(self) -> str:
        """Why it no longer serves, "" while it does."""
        processes = self.processes()
        if not (self.child.alive and all(map(is_alive, processes))):
            return "died"
        return self.child.hung(self.pulse.silence, self.silence_s, processes)

    def bring_up(self) -> None:
        """It serves from now on."""
        self.child.up = True

    def bring_down(self, failure: str) -> str:
        """Kill what is left of it. Returns what happened, for logs and the state."""
        self.child.up = False
        self.child.end(grace=0)
        return f"{self.child.name} {failure} and is restarting"
