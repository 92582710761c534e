"""What the script of faults makes of what it sees; tests/serving/lifecycle inflicts them on a real service."""

from __future__ import annotations

import json
import signal
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.load.clients.base import GenerationError
from benchmarks.robustness import faults
from benchmarks.robustness.faults import Fault, Streams, Trial, Watch, _lies, main
from redraft.serving import launcher
from redraft.serving.processes import ServingError
from redraft.serving.rundir import State
from redraft.serving.settings import ServeSettings


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"back_s": 5.1}, ["back after 5.1 s"]),
        ({"back_s": None}, ["back after 120.0 s"]),
        ({"lies": 2}, ["health was wrong 2 times"]),
        ({"streams": Counter(whole=3, failed=2)}, []),
        ({"streams": Counter(changed=1, hang=2)}, ["1 streams: changed", "2 streams: hang"]),
        ({"streams": Counter(whole=3, failed=2), "unwatched": True}, ["2 streams: failed"]),
        ({"left": ["x"]}, ["left: x"]),
        ({"back_s": None, "error": "ServingError: x"}, ["ServingError: x"]),
    ],
)
def test_what_is_wrong(changes, wrong):
    fault = Fault(**({"process": "guard", "signal": "SIGKILL", "limit_s": 5.0, "back_s": 1.0} | changes))
    assert fault.wrong == wrong
    written = json.loads(json.dumps(fault.report))
    assert (written["wrong"], written["streams"]) == (wrong, dict(fault.streams))


def test_a_case_that_fails_is_reported_and_the_next_one_goes_on(tmp_path, monkeypatch):
    """A service that is not there is started anew, twice at first; what is known is written after each case."""
    output, served = tmp_path / "faults.json", []

    def serve(settings, path, note):
        served.append(path)
        if len(served) == 4:
            raise ServingError("a service is running")

    monkeypatch.setattr(launcher, "serve", serve)
    monkeypatch.setattr(launcher, "is_running", lambda _: False)
    monkeypatch.setattr(launcher, "stop", lambda _: 0)
    monkeypatch.setattr(Trial, "inflict", lambda _, name, number: Fault(name, number.name, 5.0, 1.0))
    arguments = ["--bundle", str(tmp_path), "--process", "supervisor", "--output", str(output)]
    assert main(arguments) == 1
    assert len(served) == 4
    assert [fault["wrong"] for fault in json.loads(output.read_text())["faults"]] == [
        [], ["ServingError: a service is running"]
    ]  # fmt: skip


def test_a_launcher_of_ranks_that_is_stopped_is_resumed(tmp_path, monkeypatch):
    """Nothing else does that, and the ranks go on without it."""
    victim = psutil.Popen(["sleep", "60"])
    running = lambda *_: victim.status() != psutil.STATUS_STOPPED  # noqa: E731
    watch = SimpleNamespace(stop=int, well_since=running, lies=lambda _: 0)
    monkeypatch.setattr(launcher, "serve", lambda *_: None)
    monkeypatch.setattr(launcher, "stop", lambda _: 0)
    monkeypatch.setattr(faults, "Streams", lambda *_: SimpleNamespace(stop=int, counts=Counter(whole=6)))
    monkeypatch.setattr(faults, "Watch", lambda _: watch)
    monkeypatch.setattr(faults, "STOPPED_S", 0.1)
    monkeypatch.setattr(Trial, "_grpc_answers", lambda _: True)
    settings = ServeSettings(bundle=tmp_path)
    state = State(phase="ready", worker_pid=victim.pid, rank_pids={0: 0, 1: 0}, settings=settings)
    monkeypatch.setattr(Trial, "state", lambda _: state)
    try:
        fault = Trial(tmp_path, tmp_path, 1, 2).inflict("launcher of the ranks", signal.SIGSTOP)
        assert fault.wrong == []
        assert fault.unwatched
    finally:
        victim.kill()
        victim.wait()


def test_streams_that_cannot_begin_say_so(tmp_path):
    """Nobody listens at these ports."""
    ports = {f"{name}_port": 1 for name in ("http", "grpc", "metrics", "openai")}
    with pytest.raises(GenerationError):
        Streams(ServeSettings(bundle=tmp_path, **ports), 2)


def test_health_may_be_late_but_not_wrong():
    """Requests fail from 1.0 to 9.0. Who says ready after 4.0 is wrong, or later where the fault began later."""
    truth = [(0.0, 0.5, True), *((moment, moment + 1.0, False) for moment in range(1, 9)), (9.0, 9.5, True)]
    ready = [(moment + 0.5, moment + 0.6, True) for moment in range(10)]
    assert _lies(ready, truth, begun=0.0) == 5
    assert _lies(ready, truth, begun=4.0) == 2
    assert _lies([(at, answered, False) for at, answered, _ in ready], truth, 0.0) == 0


def test_all_is_well_once_each_was_asked_since():
    watch = object.__new__(Watch)
    watch.seen = {"a": [(1.0, 1.1, True), (3.0, 3.1, True)], "b": [(2.5, 2.6, True)]}
    assert watch.well_since(2.0)
    assert not watch.well_since(2.7)
    watch.seen["b"].append((4.0, 4.1, False))
    assert not watch.well_since(2.0)
