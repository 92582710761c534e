"""Health questions that a thread asks again and again, so that the supervisor never waits for an answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

RETRY_S = 0.05

log = logging.getLogger("redraft.supervisor")


class Pulse:
    """Asks `answers` until the process ends: `period` seconds after a good answer, soon after none. An exception is no
    answer."""

    def __init__(self, answers: Callable[[], bool], period: float):
        self._answers, self._period = answers, period
        self._begun = time.monotonic()
        self._lock, self._wake = threading.Lock(), threading.Event()
        self.answered = False
        """Whether the last question found a good answer; False after `reset`."""
        self.silence = 0.0
        """Seconds from the first to the end of the last of two or more questions in a row that found none, else 0. Time
        in which this process was stopped does not count: the question after it finds an answer."""
        threading.Thread(target=self._run, name="redraft-pulse", daemon=True).start()

    def reset(self) -> None:
        """Begin anew, with something that has just started or changed. Answers to earlier questions do not count."""
        with self._lock:
            self._begun, self.answered, self.silence = time.monotonic(), False, 0.0
        self._wake.set()

    def _run(self) -> None:
        failing_since: float | None = None
        while True:
            asked = time.monotonic()
            answered = self._ask()
            with self._lock:
                if asked < self._begun:
                    failing_since = None
                    continue
                if answered:
                    failing_since, self.silence = None, 0.0
                elif failing_since is None:
                    failing_since = asked
                else:
                    self.silence = time.monotonic() - failing_since
                self.answered = answered
            self._wake.wait(self._period if answered else RETRY_S)
            self._wake.clear()

    def _ask(self) -> bool:
        try:
            return self._answers()
        except Exception:
            log.exception("a question of the supervisor failed")
            return False
