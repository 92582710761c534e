"""A thread that clients share: whose turn is next, and what becomes of calls that fail or are withdrawn."""

from __future__ import annotations

import threading
import time

import pytest

from redraft.worker.fair import FairExecutor


@pytest.fixture
def executor():
    shared = FairExecutor("test")
    yield shared
    shared.shutdown()


def held(executor: FairExecutor) -> threading.Event:
    """Keep the thread busy until the event is set."""
    free, begun = threading.Event(), threading.Event()
    executor.submit("holder", lambda: begun.set() or free.wait(60))
    assert begun.wait(60)
    return free


def test_the_next_turn_is_the_clients_that_has_had_least(executor):
    executor.submit("busy", time.sleep, 0.2).result(60)
    executor.submit("less busy", time.sleep, 0.05).result(60)
    free, order = held(executor), list[str]()
    names = ["busy", "less busy", "new", "busy", "less busy", "other"]
    futures = [executor.submit(name, order.append, f"{name} {place}") for place, name in enumerate(names)]
    free.set()
    for future in futures:
        future.result(60)
    assert order == ["new 2", "other 5", "less busy 1", "less busy 4", "busy 0", "busy 3"]


def test_what_was_used_long_ago_is_forgotten(executor, monkeypatch):
    monkeypatch.setattr("redraft.worker.fair.HALF_LIFE_S", 0.001)
    executor.submit("busy", time.sleep, 0.05).result(60)
    time.sleep(0.05)
    free, order = held(executor), list[str]()
    futures = [executor.submit(name, order.append, name) for name in ("busy", "new")]
    free.set()
    for future in futures:
        future.result(60)
    assert order == ["busy", "new"]


def test_a_call_may_fail_or_be_withdrawn(executor):
    free, order = held(executor), list[int]()
    futures = [executor.submit("one", order.append, number) for number in range(3)]
    failing = executor.submit("one", divmod, 1, 0)
    assert futures[1].cancel()
    free.set()
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    assert order == [0, 2]
