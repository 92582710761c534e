"""A bound on what the bodies of all requests take together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Room:
    """Bytes that all bodies together may take. `refuse` makes the error for what goes beyond."""

    def __init__(self, limit: int, refuse: Callable[[str], Exception]):
        self._limit, self._refuse = limit, refuse
        self._taken = 0

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """One body's room, which is free again afterwards. What it yields takes so many bytes more of it, or raises."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self._taken + size > self._limit:
                raise self._refuse(f"overloaded: bodies of {self._limit} bytes are held: try again later")
            self._taken += size
            taken += size

        try:
            yield take
        finally:
            self._taken -= taken
