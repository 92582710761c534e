"""A running service against another user of the machine, who may ask it for answers and for nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from redraft.serving import launcher
from redraft.serving.processes import shared_memory_prefix
from tests.serving.client_side import FAKE_WORKER, start, wait_until


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_controls_nothing(run_folder, fake_bundle):
    run_folder.chmod(0o755)
    service = start(run_folder, fake_bundle, worker_command=FAKE_WORKER)
    marker = f"/tmp/redraft-intruder-{os.getpid()}"
    ports, state = service.settings, service.state
    arguments = [str(ports.http_port), str(ports.grpc_port), str(service.run_dir.path), str(state.triton_pid), marker]
    command = [sys.executable, "-m", "tests.serving.intruder", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not os.path.exists(marker), "code ran as the service"
    assert done.stdout.splitlines() == ["everybody 200 200 200 200 True"], done.stderr
    assert done.returncode == 0, done.stderr
    assert service.state.triton_restarts == 0
    (planted,) = (
        path for path in Path("/dev/shm").glob(f"{shared_memory_prefix(service.run_dir.path)}*") if path.is_dir()
    )
    try:
        os.kill(state.triton_pid, signal.SIGKILL)
        wait_until(lambda: service.state.triton_restarts == 1 and service.state.phase == "ready")
        launcher.stop(service.run_dir.path)
    finally:
        planted.rmdir()
