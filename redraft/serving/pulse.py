"""How long something has not answered, asked from a thread of its own: whoever wants to know never waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pulse:
    """Asks `answers` again and again, `period` seconds after each reply, until the process ends."""

    def __init__(self, answers: Callable[[], bool], period: float):
        self._answers, self._period = answers, period
        self._last = time.monotonic()
        threading.Thread(target=self._run, name="redraft-pulse", daemon=True).start()

    @property
    def silence(self) -> float:
        """Seconds since the last good answer, or since `reset`."""
        return time.monotonic() - self._last

    def reset(self) -> None:
        """Begin anew, with something that has just started."""
        self._last = time.monotonic()

    def _run(self) -> None:
        while True:
            if self._answers():
                self.reset()
            time.sleep(self._period)
