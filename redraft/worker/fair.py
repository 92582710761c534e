"""A thread that its clients share: the next turn is that of the client which has had the least of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

HALF_LIFE_S = 10.0
"""What a client has used counts half after so long."""
FORGOTTEN_S = 0.001
"""A client that has used less is a new one."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class _Use:
    seconds: float = 0.0
    at: float = field(default_factory=time.monotonic)

    def now(self, now: float) -> float:
        """The seconds, as far as they still count."""
        return self.seconds * 0.5 ** ((now - self.at) / HALF_LIFE_S)


class FairExecutor:
    """One thread that runs calls of many clients. Calls of one client keep their order."""

    def __init__(self, name: str):
        self._threads = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._waiting: list[tuple[Hashable, Future[Any], Callable[[], Any]]] = []
        self._used: dict[Hashable, _Use] = {}

    def submit(self, client: Hashable, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function when it is the client's turn."""
        future = Future[T]()
        with self._lock:
            self._waiting.append((client, future, lambda: function(*args, **kwargs)))
        self._threads.submit(self._run_next)
        return future

    def shutdown(self) -> None:
        """Run no further calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        """Run the call whose turn it is, which need not be the one that this was queued with."""
        with self._lock:
            client, future, call = self._waiting.pop(self._next())
        if not future.set_running_or_notify_cancel():
            return
        started = time.monotonic()
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        now = time.monotonic()
        with self._lock:
            use = self._used.get(client, _Use())
            self._used[client] = _Use(use.now(now) + now - started, now)

    def _next(self) -> int:
        now = time.monotonic()
        self._used = {client: use for client, use in self._used.items() if use.now(now) > FORGOTTEN_S}
        uses = [self._used[client].now(now) if client in self._used else 0.0 for client, _, _ in self._waiting]
        return uses.index(min(uses))
