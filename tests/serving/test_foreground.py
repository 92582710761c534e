"""A service in the foreground: it passes logs on, says why it ended, and ends when it is asked to."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from redraft.serving import launcher
from redraft.serving.launcher import stay
from redraft.serving.processes import OWNER_VARIABLE, ServingError, owned_processes
from redraft.serving.rundir import RunDir, State
from redraft.serving.settings import ServeSettings
from tests.cli.commands import run_command
from tests.conftest import wait_until


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    return RunDir(tmp_path)


@contextmanager
def held_until(condition: Callable[[], object], run_dir: RunDir, phase: str, error: str) -> Iterator[None]:
    """A supervisor's lock, and what it says when it lets go of it."""
    lock = run_dir.lock_file.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def end() -> None:
        wait_until(lambda: bool(condition()))
        with run_dir.worker_log.open("a") as log:
            log.write("two\n")
        run_dir.write_state(State(phase=phase, error=error, settings=ServeSettings(bundle=Path("b"))))
        lock.close()

    run_dir.worker_log.write_text("one\n")
    thread = threading.Thread(target=end)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize(
    ("phase", "error", "why"),
    [
        ("failed", "the bundle is gone", "the bundle is gone"),
        ("ready", "", "the supervisor was killed"),
        ("stopped", "", ""),
    ],
)
def test_why_a_service_ended(run_dir, phase, error, why):
    texts: list[str] = []
    with held_until(lambda: texts, run_dir, phase, error):
        assert stay(run_dir.path, texts.append) == why
    assert texts == ["one\n", "two\n"]


def test_an_interrupt_ends_the_service(run_dir):
    def interrupt(text: str) -> None:
        if text == "one\n":
            raise KeyboardInterrupt

    process = subprocess.Popen(["sleep", "60"], env=os.environ | {OWNER_VARIABLE: str(run_dir.path)})
    run_dir.worker_log.write_text("one\n")
    run_dir.write_state(State(phase="ready", settings=ServeSettings(bundle=Path("b"))))
    with run_dir.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert stay(run_dir.path, interrupt) == ""
    assert process.wait(timeout=60) == -signal.SIGKILL


def test_sigterm_while_starting(run_dir):
    """As a container runtime sends it to the first process, which has no default action for it."""
    program = """
import time
from redraft import cli
from redraft.serving import launcher

def serve(*_):
    print("starting", flush=True)
    time.sleep(600)

launcher.serve = serve
cli.main()
"""
    command = [sys.executable, "-c", program, "serve", "--foreground", "--bundle", "b", "--run-dir", str(run_dir.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted, nothing is left running" in errors


@pytest.mark.parametrize(("why", "status"), [("", 0), ("the bundle is gone", 1)])
def test_the_exit_status_says_whether_it_was_asked_to_end(run_dir, monkeypatch, why, status):
    settings = ServeSettings(bundle=Path("b"), address="0.0.0.0")
    monkeypatch.setattr(launcher, "serve", lambda given, *_: State(settings=given))
    monkeypatch.setattr("redraft.serving.launcher.stay", lambda *_: why)
    options = ["--foreground", "--bundle", str(settings.bundle), "--address", "0.0.0.0", "--run-dir", str(run_dir.path)]
    before = signal.getsignal(signal.SIGTERM)
    try:
        done = run_command(["serve", *options])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == status
    assert "HTTP     http://0.0.0.0:8000" in done.output
    assert why in done.output


@pytest.mark.parametrize("starts", [True, False])
def test_an_interrupt_before_it_was_said_ends_what_this_process_started(run_dir, monkeypatch, starts):
    """The service is up and said so, or gone; another's service stays."""
    code = ["sleep", "60"] if starts else ["sh", "-c", "sleep 60 & echo $!"]
    started = subprocess.Popen(
        code, env=os.environ | {OWNER_VARIABLE: str(run_dir.path)}, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    pid = started.pid if starts else int(started.stdout.readline())
    state = State(phase="ready", settings=ServeSettings(bundle=Path("b")), supervisor_pid=pid)
    run_dir.write_state(state)
    monkeypatch.setattr(launcher, "serve", lambda *_: state)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("redraft.cli.service._say_ready", interrupt)
    before = signal.getsignal(signal.SIGTERM)
    try:
        done = run_command(["serve", "--bundle", "b", "--run-dir", str(run_dir.path)])
        assert done.exit_code == 130
        assert bool(owned_processes(run_dir.path)) != starts
    finally:
        signal.signal(signal.SIGTERM, before)
        launcher.stop(run_dir.path)
        started.wait(timeout=60)


def test_an_interrupted_start_that_cannot_be_ended_says_so(run_dir, monkeypatch):
    monkeypatch.setattr(launcher, "serve", MagicMock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(launcher, "_is_own", lambda _: True)
    monkeypatch.setattr(launcher, "stop", MagicMock(side_effect=ServingError("it belongs to another user")))
    before = signal.getsignal(signal.SIGTERM)
    try:
        done = run_command(["serve", "--bundle", "b", "--run-dir", str(run_dir.path)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == 1
    assert done.output == ("redraft serve: interrupted, but the service may still run: it belongs to another user\n")


@pytest.mark.parametrize("own", [True, False])
def test_an_interrupt_leaves_no_service_of_ones_own_whenever_it_comes(run_dir, monkeypatch, own):
    """A stop that was cut short may have ended the supervisor, by which a service is known as one's own."""
    is_own, stop = MagicMock(side_effect=[KeyboardInterrupt, own]), MagicMock(side_effect=[KeyboardInterrupt, 0])
    monkeypatch.setattr(launcher, "_is_own", is_own)
    monkeypatch.setattr(launcher, "stop", stop)
    launcher.end(run_dir.path, only_own=True)
    assert (is_own.call_count, stop.call_count) == (2, 2 * own)


def test_interrupts_only_hasten_the_end(run_dir, monkeypatch):
    calls: list[Path] = []

    def stop(path: Path) -> int:
        calls.append(path)
        if len(calls) < 4:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(launcher, "stop", stop)
    launcher.end(run_dir.path)
    assert len(calls) == 4
