"""When a child of the supervisor counts as hung."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from redraft.serving.child import STOPPED_TICKS, Child
from redraft.serving.listeners import SILENCE_S, Watched
from redraft.serving.processes import is_stopped
from redraft.serving.rundir import RunDir
from tests.conftest import wait_until


@pytest.fixture
def watched(tmp_path) -> Iterator[Watched]:
    """One that is up."""
    run_dir = RunDir(tmp_path)
    child = Child(run_dir, "x", "the sleeper", ["sleep", "60"], run_dir.triton_log, dict(os.environ), tmp_path, 1.0)
    made = Watched(child, lambda: True)
    made.pulse = SimpleNamespace(silence=0.0, answered=True, reset=lambda: None)
    made.start()
    assert made.watch() == ""
    assert child.up
    yield made
    child.end(grace=0)


def test_silence_ends_it_after_its_limit(watched):
    watched.pulse.silence = SILENCE_S - 1
    assert watched.watch() == ""
    watched.pulse.silence = SILENCE_S
    assert watched.watch() == "the sleeper did not answer for 15 s and is restarting"
    assert not watched.child.alive


def test_a_stop_ends_it_after_some_ticks_in_a_row(watched):
    """However much time a tick takes: this process may have been stopped too. Each start counts anew."""
    child = watched.child
    for number in range(2):
        for told in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
            os.kill(child.pid, told)
            wait_until(lambda told=told: is_stopped(psutil.Process(child.pid)) == (told == signal.SIGSTOP))
            assert [watched.watch() for _ in range(STOPPED_TICKS - 1)] == [""] * (STOPPED_TICKS - 1)
        assert watched.watch() == "the sleeper was stopped by a signal and is restarting"
        assert not child.alive
        wait_until(lambda: watched.watch() == "" and child.up)
        assert child.restarts == number + 1
