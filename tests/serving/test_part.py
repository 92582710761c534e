"""When a child of the supervisor counts as hung."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from redraft.serving.child import STOPPED_TICKS, Child, Part
from redraft.serving.processes import ServingError, is_stopped
from redraft.serving.rundir import RunDir
from tests.conftest import wait_until


@pytest.fixture
def part(tmp_path) -> Iterator[Part]:
    """One that is up."""
    run_dir = RunDir(tmp_path)
    child = Child(run_dir, "x", "the sleeper", ["sleep", "60"], run_dir.triton_log, dict(os.environ), tmp_path, 1.0)
    made = Part(child, lambda: True, 2.0)
    made.pulse = SimpleNamespace(silence=0.0, answered=True, reset=lambda: None)
    made.start()
    assert made.watch() == ""
    assert child.up
    yield made
    child.end(grace=0)


def test_a_wait_ends_with_each_part_that_starts_beside_it(part):
    """An answer from before the end would call a dead server up; a part that nobody waits for yet is told late."""
    other = Part(part.child, lambda: False, 2.0)
    other.child = SimpleNamespace(alive=True, age=0.0)
    other.pulse = SimpleNamespace(answered=False)
    part.child.up = False
    os.kill(part.child.pid, signal.SIGKILL)
    wait_until(lambda: not part.child.alive)
    for waits, beside in ((part, []), (other, [part])):
        with pytest.raises(ServingError, match="the sleeper was killed by signal 9"):
            waits.wait(beside)
    assert not part.up


def test_silence_ends_it_after_its_limit(part):
    part.pulse.silence = Part.silence_s - 1
    assert part.watch() == ""
    part.pulse.silence = Part.silence_s
    assert part.watch() == "the sleeper did not answer for 15 s and is restarting"
    assert not part.child.alive


def test_a_stop_ends_it_after_some_ticks_in_a_row(part):
    """However much time a tick takes: this process may have been stopped too. Each start counts anew."""
    child = part.child
    for number in range(2):
        for told in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
            os.kill(child.pid, told)
            wait_until(lambda told=told: is_stopped(psutil.Process(child.pid)) == (told == signal.SIGSTOP))
            assert [part.watch() for _ in range(STOPPED_TICKS - 1)] == [""] * (STOPPED_TICKS - 1)
        assert part.watch() == "the sleeper was stopped by a signal and is restarting"
        assert not child.alive
        wait_until(lambda: part.watch() == "" and child.up)
        assert child.restarts == number + 1
