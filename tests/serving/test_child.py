"""The limits and the log of a process that the supervisor starts."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from redraft.serving.child import STEADY_S, Child
from redraft.serving.rundir import RunDir

LIMIT = 1000


@pytest.fixture
def child(tmp_path) -> Iterator[Child]:
    run_dir = RunDir(tmp_path)
    environment = dict(os.environ)
    made = Child(run_dir, "x", "x", ["sleep", "60"], run_dir.triton_log, environment, tmp_path, 1.0, LIMIT)
    yield made
    made.end(grace=0)


def test_it_may_open_as_many_files_as_the_hard_limit_says(child):
    """A server that runs out of them sees its repository no more, and unloads all models."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        child.start()
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_ends_before_it_has_become_its_program(child, monkeypatch):
    """In an exec it has no environment that would tell whose it is."""
    monkeypatch.setattr(child, "processes", list)
    child.start()
    child.end(grace=0)
    assert not child.alive


def test_a_full_log_gives_way_to_a_new_one(tmp_path, child):
    log, old = tmp_path / "triton.log", tmp_path / "triton.log.1"
    log.write_text("x" * (LIMIT // 2))
    child.start()
    assert not old.exists()
    log.write_text("x" * LIMIT)
    child.start()
    assert (log.stat().st_size, old.stat().st_size) == (0, LIMIT)


def test_what_was_up_for_long_is_back_as_soon_as_the_first_time(child, monkeypatch):
    """Only what ends again and again waits longer each time."""
    now, delays = [100.0], []
    monkeypatch.setattr("redraft.serving.child.time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    for seconds in (0, 0, 0, STEADY_S + 1, 0):
        child.start()
        child.up = True
        now[0] += seconds
        child.up = False
        child.end(grace=0)
        assert not child.restart_due()
        delays.append(round(child._restart_at - now[0], 3))
    assert delays == [0.2, 0.4, 0.8, 0.2, 0.4]


def test_without_a_log_it_runs_all_the_same(child):
    """On a full disk a new one cannot be made."""
    child._log_file = child._log_file.parent / "gone" / "x.log"
    child.start()
    assert child.alive
