"""Starting services for tests of their lifecycle, and what must be left of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from redraft.serving import launcher
from redraft.serving.processes import owned_processes, shared_memory_prefix
from redraft.serving.rundir import RunDir
from redraft.serving.settings import ServeSettings
from tests.serving.client_side import FAKE_WORKER, free_ports


def settings(bundle: Path, **changes) -> ServeSettings:
    http, grpc, metrics = free_ports(3)
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "openai_port": 0}
    return ServeSettings(bundle=bundle, **({"worker_command": FAKE_WORKER} | ports | changes))


def serve(folder: Path, wanted: ServeSettings) -> list[str]:
    activities: list[str] = []
    launcher.serve(wanted, folder, activities.append)
    return activities


def assert_nothing_is_left(folder: Path) -> None:
    assert owned_processes(folder.resolve()) == []
    assert list(Path("/dev/shm").glob(f"{shared_memory_prefix(folder.resolve())}*")) == []
    assert not RunDir(folder).socket.exists()


def redraft(*arguments: str, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "redraft", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
