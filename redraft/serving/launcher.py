"""Start and stop a service from the command line."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from redraft.errors import IN_CLONE
from redraft.serving.processes import (
    OWNER_VARIABLE,
    ServingError,
    check_port,
    end_processes,
    is_alive,
    owned_processes,
    remove_shared_memory,
)
from redraft.serving.ranks import bundle_ranks, launch_command
from redraft.serving.rundir import RunDir, Settings, State, tail
from redraft.serving.tritonserver import TritonInstallation

STOP_S = 25.0
"""A supervisor takes at most so long to begin to end all, and to end it after its requests have ended or
`Settings.drain_s` is over."""
FREED_S = 3.0
"""A server that was killed a moment ago is no longer listed, but holds its ports until its last thread has ended."""
_POLL_S = 0.1


def serve(settings: Settings, run_path: Path, on_progress: Callable[[str], None]) -> State:
    """Start a service and return when a real request has succeeded. `on_progress` is told each new activity.

    Raises ServingError, and KeyboardInterrupt passes through; in both cases nothing is left running.
    """
    run_dir = RunDir(run_path)
    settings = settings.model_copy(
        update={
            "bundle": settings.bundle.resolve(),
            "hostfile": settings.hostfile and settings.hostfile.resolve(),
        }
    )
    _check(settings, run_dir)
    with _launching(run_dir), _private():
        _check_free(run_dir)
        stop(run_path)
        _check_ports(settings)
        _write_settings(settings, run_dir)
        try:
            return _follow(run_dir, _start_supervisor(run_dir), on_progress)
        except BaseException:
            stop(run_path)
            raise


def stop(run_path: Path) -> int:
    """End the service of a run directory, whatever state it is in. Returns how many processes it had.

    Running requests end first, for at most `Settings.drain_s`; called again meanwhile, at once. A supervisor that
    hangs is killed.
    Afterwards no process and no shared memory of it is left, also when parts of it had been killed. Raises
    ServingError where the run directory cannot be used.
    """
    run_dir = RunDir(run_path)
    _check_owner(run_dir)
    processes = owned_processes(run_dir.path)
    state = run_dir.read_state()
    for process in processes:
        if state and process.pid == state.supervisor_pid:
            _end_supervisor(run_dir, process)
    end_processes(owned_processes(run_dir.path), grace=0)
    remove_shared_memory(run_dir.path)
    try:
        run_dir.socket.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(run_dir, error) from None
    if state and state.phase not in ("stopped", "failed"):
        with contextlib.suppress(OSError), _private():
            run_dir.write_state(state.model_copy(update={"phase": "stopped", "detail": ""}))
    return len(processes)


def _end_supervisor(run_dir: RunDir, supervisor: psutil.Process) -> None:
    """Ask it to end, and kill it where it says nothing of that within STOP_S, or takes longer than it may."""
    begun = time.monotonic()
    with contextlib.suppress(psutil.NoSuchProcess):
        supervisor.terminate()
    while is_alive(supervisor):
        state = run_dir.read_state()
        drain_s = state.settings.drain_s if state and state.phase == "stopping" else 0.0
        if time.monotonic() > begun + STOP_S + drain_s:
            break
        time.sleep(_POLL_S)
    end_processes([supervisor], grace=0)


def is_running(run_dir: RunDir) -> bool:
    """Whether a supervisor holds the run directory. Raises ServingError where this user may not look into it."""
    _check_owner(run_dir)
    try:
        with run_dir.lock_file.open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unusable(run_dir, error) from None
    return False


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """Only this user can read what is made meanwhile, by the processes that are started too: the files, sockets and
    shared memory of a service hold prompts."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def _launching(run_dir: RunDir) -> Iterator[None]:
    """Hold the run directory until the supervisor holds it. Raises ServingError while another launcher does."""
    folder = os.open(run_dir.path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServingError(
                f"another `redraft serve` is starting a service from {run_dir.path}: wait until it is ready, or "
                "choose another directory with --run-dir, and other ports"
            ) from None
        yield
    finally:
        os.close(folder)


def _check_owner(run_dir: RunDir) -> None:
    """Raises ServingError for the run directory of another user, unless this one is root."""
    try:
        owner = run_dir.path.stat().st_uid
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(run_dir, error) from None
    if os.geteuid() not in (0, owner):
        raise ServingError(
            f"cannot use the run directory {run_dir.path}: it belongs to another user, and only that user sees and "
            "stops its service; choose another with --run-dir"
        )


def _unusable(run_dir: RunDir, error: OSError) -> ServingError:
    return ServingError(f"cannot use the run directory {run_dir.path}: {error.strerror}; choose another with --run-dir")


def _check(settings: Settings, run_dir: RunDir) -> None:
    if not (settings.bundle / "config.json").is_file():
        raise ServingError(
            f"{settings.bundle} is not a bundle: it has no config.json; `make engines`{IN_CLONE} builds one"
        )
    launch_command([], bundle_ranks(settings.bundle), settings.hostfile)
    TritonInstallation()
    try:
        run_dir.create()
    except OSError as error:
        raise _unusable(run_dir, error) from None


def _check_free(run_dir: RunDir) -> None:
    if is_running(run_dir):
        raise ServingError(f"a service is running from {run_dir.path}: `redraft stop` ends it")


def _check_ports(settings: Settings) -> None:
    ports = {"HTTP": settings.http_port, "gRPC": settings.grpc_port, "metrics": settings.metrics_port}
    if settings.openai_port:
        ports["OpenAI"] = settings.openai_port
    if len(set(ports.values())) < len(ports):
        given = ", ".join(f"{purpose} {port}" for purpose, port in ports.items())
        raise ServingError(f"the ports are {given}: expected different ones")
    deadline = time.monotonic() + FREED_S
    for purpose, port in ports.items():
        while True:
            try:
                check_port(port, purpose, f"--{purpose.lower()}-port")
                break
            except ServingError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)


def _write_settings(settings: Settings, run_dir: RunDir) -> None:
    """Leave the settings to the supervisor, in a directory without the last service's logs and state."""
    try:
        written = (run_dir.triton_log, run_dir.guard_log, run_dir.openai_log)
        limited = [log for one in written for log in run_dir.path.glob(f"{one.name}*")]
        for old in (run_dir.worker_log, run_dir.supervisor_log, *limited, run_dir.state_file):
            old.unlink(missing_ok=True)
        run_dir.settings_file.write_text(settings.model_dump_json(indent=1))
        run_dir.settings_file.chmod(0o600)
    except OSError as error:
        raise ServingError(f"cannot write {run_dir.settings_file}: {error.strerror}") from None


def _start_supervisor(run_dir: RunDir) -> subprocess.Popen[bytes]:
    with run_dir.supervisor_log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "redraft.serving.supervisor", str(run_dir.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {OWNER_VARIABLE: str(run_dir.path)},
            cwd=Path(__file__).resolve().parents[2],
            start_new_session=True,
        )


def _follow(run_dir: RunDir, supervisor: subprocess.Popen[bytes], on_progress: Callable[[str], None]) -> State:
    shown = ""
    while True:
        ended = supervisor.poll() is not None
        state = run_dir.read_state()
        if state and state.phase == "ready":
            return state
        if ended:
            log = f"the supervisor ended with status {supervisor.returncode}:\n{tail(run_dir.supervisor_log)}"
            raise ServingError(state.error if state and state.error else log)
        if state and state.detail != shown:
            shown = state.detail
            on_progress(shown)
        time.sleep(_POLL_S)
