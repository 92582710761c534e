"""A running service against another user of the machine, who may ask it for answers and for nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from redraft.serving import launcher
from redraft.serving.processes import shared_memory_prefix
from tests.conftest import wait_until
from tests.serving.client_side import FAKE_WORKER, start


@contextlib.contextmanager
def watched_modes(run_dir: Path) -> Iterator[set[int]]:
    """The modes that the service's regions of shared memory have, from the moment when they are made."""
    modes: set[int] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for region in Path("/dev/shm").glob(f"{shared_memory_prefix(run_dir)}*"):
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISREG(mode := region.stat().st_mode):
                        modes.add(stat.S_IMODE(mode))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield modes
    finally:
        done.set()
        thread.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_controls_nothing(run_folder, fake_bundle):
    run_folder.chmod(0o755)
    service = start(run_folder, fake_bundle, worker_command=FAKE_WORKER)
    marker = f"/tmp/redraft-intruder-{os.getpid()}"
    ports, state = service.settings, service.state
    arguments = [str(ports.http_port), str(ports.grpc_port), str(service.run_dir.path), str(state.triton_pid), marker]
    command = [sys.executable, "-m", "tests.serving.lifecycle.intruder", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not os.path.exists(marker), "code ran as the service"
    assert done.stdout.splitlines() == ["everybody 200 200 200 200 True"], done.stderr
    assert done.returncode == 0, done.stderr
    assert service.state.triton_restarts == 0
    (planted,) = (
        path for path in Path("/dev/shm").glob(f"{shared_memory_prefix(service.run_dir.path)}*") if path.is_dir()
    )
    try:
        with watched_modes(service.run_dir.path) as modes:
            os.kill(state.triton_pid, signal.SIGKILL)
            wait_until(lambda: service.state.triton_restarts == 1 and service.state.phase == "ready")
        assert modes == {0o600}, "somebody who polls could have opened a region that holds prompts later"
        launcher.stop(service.run_dir.path)
    finally:
        planted.rmdir()
