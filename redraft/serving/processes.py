"""What a running service leaves on the machine: processes, shared memory, ports; and how to take it away again."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import stat
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

OWNER_VARIABLE = "REDRAFT_SERVICE"
"""Environment variable that every process of a service carries, children of children included."""
PART_VARIABLE = "REDRAFT_PART"
"""Environment variable with the part of the service that a process belongs to."""
WORKER_PART = "worker-"
"""How the names of the parts begin that the workers are."""

SHARED_MEMORY = Path("/dev/shm")
_KILL_S = 5.0


class ServingError(RuntimeError):
    """The service cannot start or stop; the text says why and what to do."""


def owned_processes(run_dir: Path, part: str | None = None) -> list[psutil.Process]:
    """Return the live processes of the service at `run_dir`, or of one part of it, whoever their parent is now; never
    the calling process."""
    owned = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            belongs = environment.get(OWNER_VARIABLE) == str(run_dir)
            belongs &= part in (None, environment.get(PART_VARIABLE))
            if belongs and process.pid != os.getpid() and is_alive(process):
                owned.append(process)
        except psutil.Error:
            continue
    return owned


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie that nobody has reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_stopped(process: psutil.Process) -> bool:
    """Whether a signal (SIGSTOP) keeps it from running; one that a debugger holds is not meant."""
    return process.status() == psutil.STATUS_STOPPED


def end_processes(processes: Iterable[psutil.Process], grace: float) -> None:
    """SIGTERM, then SIGKILL to what is left after `grace` seconds (at once if 0)."""
    remaining = list(processes)
    if grace:
        for process in remaining:
            _signal(process, kill=False)
        remaining = _wait(remaining, grace)
    for process in remaining:
        _signal(process, kill=True)
    _wait(remaining, _KILL_S)


def shared_memory_prefix(run_dir: Path) -> str:
    """Start of the names of the shared memory regions of Triton's Python backend that belong to `run_dir`."""
    return f"triton_python_backend_shm_region_{hashlib.sha256(str(run_dir).encode()).hexdigest()[:12]}_"


def remove_shared_memory(run_dir: Path) -> list[str]:
    """Delete the regions of a service whose processes have ended. Returns their names.

    Anybody can put something else under such a name. It is left where it is: Triton makes regions of new names.
    """
    removed = []
    for region in SHARED_MEMORY.glob(f"{shared_memory_prefix(run_dir)}*"):
        with contextlib.suppress(OSError):
            status = region.lstat()
            if stat.S_ISREG(status.st_mode) and os.geteuid() in (0, status.st_uid):
                region.unlink()
                removed.append(region.name)
    return removed


def check_port(port: int, purpose: str, option: str) -> None:
    """Raises ServingError if 127.0.0.1:`port` cannot be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise ServingError(
                f"port {port} on 127.0.0.1 ({purpose}) {reason}: stop the program that holds it "
                f"or choose another port with {option}"
            ) from None


def check_room(folder: Path, size: int, purpose: str, remedy: str) -> None:
    """Raises ServingError if `folder` has no room for `size` more bytes. Nothing is taken meanwhile: others that write
    there would die of it."""
    space = os.statvfs(folder)
    if (free := space.f_bavail * space.f_frsize) < size:
        raise ServingError(f"{folder} has no room for {purpose}: {free >> 20} MiB of {size >> 20} are free; {remedy}")


def _wait(processes: list[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Wait until they have ended. Returns those that have not after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while (remaining := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return remaining


def _signal(process: psutil.Process, kill: bool) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill() if kill else process.terminate()
