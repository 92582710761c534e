"""A child of the supervisor that listens for clients: restarted where it ends, or answers no more."""

from __future__ import annotations

import http.client
import logging
from collections.abc import Callable, Container

from redraft.serving.child import Child
from redraft.serving.pulse import Pulse

PROBE_S, ANSWER_S, SILENCE_S, START_S = 2.0, 5.0, 15.0, 60.0
"""It is asked every 2 s, and restarted where two questions in a row, 15 s together, find no answer within 5 s, or where
a signal has stopped it."""
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
        """Do what it needs now. Returns what befell it, "" for nothing new."""
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
