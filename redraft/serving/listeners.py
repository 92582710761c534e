"""The processes that listen for clients, as the supervisor watches them: the guard of Triton's ports, and `/v1`."""

from __future__ import annotations

import http.client
import logging
import sys
from collections.abc import Callable, Container
from pathlib import Path

from redraft.serving.child import Child
from redraft.serving.pulse import Pulse
from redraft.serving.rundir import RunDir
from redraft.serving.settings import ServeSettings, handed_on

PROBE_S, ANSWER_S, SILENCE_S, START_S = 2.0, 5.0, 15.0, 60.0
"""It is asked every 2 s, and restarted where two questions in a row, 15 s together, find no answer within 5 s, or where
a signal has stopped it."""
GUARD_DELAY_S, FRONT_END_DELAY_S = 1.0, 5.0
"""Most seconds before a restart. The guard loads nothing, and starts in a second."""
FRONT_END_DRAIN_S = 2
"""How long requests to /v1 may go on after SIGTERM."""
MAX_LOG_BYTES = 32 * 2**20
REPOSITORY = Path(__file__).resolve().parents[2]
_LOOPBACK = "127.0.0.1"

log = logging.getLogger("redraft.supervisor")


class Watched:
    """The child, and the question whether it answers."""

    def __init__(self, child: Child, answers: Callable[[], bool]):
        self.child = child
        self.pulse = Pulse(answers, PROBE_S)

    def start(self) -> None:
        """Start it; it is up when it has answered."""
        self.child.start()
        self.pulse.reset()

    def watch(self) -> str:
        """Poll it once: restart it if it is dead or hung. Returns what happened, "" for nothing new."""
        child = self.child
        alive = child.alive
        if child.up:
            what = child.hung(self.pulse.silence, SILENCE_S) if alive else "died"
            if not what:
                return ""
            child.up = False
            child.end(grace=0)
            return f"{child.name} {what} and is restarting"
        if not alive:
            if child.restart_due():
                self.start()
        elif self.pulse.answered:
            child.up = True
        elif child.age > START_S:
            log.error("%s was not ready within %.0f s", child.name, START_S)
            child.end(grace=0)
        return ""


def guard(run_dir: RunDir, settings: ServeSettings) -> Watched:
    """The guard. It answers an unknown path by itself, whatever Triton does."""
    command = [
        *(sys.executable, "-m", "redraft.serving.guard.server", "--metrics-socket", str(run_dir.metrics_socket)),
        *("--http-socket", str(run_dir.http_socket), "--grpc-socket", str(run_dir.grpc_socket)),
    ]
    child = Child(
        run_dir,
        "guard",
        "the guard of Triton's ports",
        command,
        run_dir.guard_log,
        handed_on(settings),
        REPOSITORY,
        GUARD_DELAY_S,
        MAX_LOG_BYTES,
    )
    return Watched(child, lambda: answers(settings.http_port, "/", (404,)))


def front_end(run_dir: RunDir, settings: ServeSettings) -> Watched:
    """The front end `/v1`. It follows the links in the run directory to another bundle and its worker."""
    command = [
        *(sys.executable, "-m", "redraft.openai.server", "--bundle", str(run_dir.bundle)),
        *("--socket", str(run_dir.socket), "--log", str(run_dir.openai_log)),
    ]
    child = Child(
        run_dir,
        "openai",
        "the /v1 front end",
        command,
        run_dir.openai_log,
        handed_on(settings),
        REPOSITORY,
        FRONT_END_DELAY_S,
        MAX_LOG_BYTES,
    )
    return Watched(child, lambda: answers(settings.openai_port, "/health", (200, 503)))


def answers(port: int, path: str, statuses: Container[int]) -> bool:
    """Whether what listens at a port of this machine answers with one of these statuses."""
    connection = http.client.HTTPConnection(_LOOPBACK, port, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status in statuses
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
