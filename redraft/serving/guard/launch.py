"""The guard's process as the supervisor starts it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from redraft.serving.child import Child
from redraft.serving.rundir import RunDir, Settings
from redraft.serving.watched import Watched, answers

MAX_DELAY_S = 1.0
"""It loads nothing, and starts in a second."""
MAX_LOG_BYTES = 32 * 2**20
REPOSITORY = Path(__file__).resolve().parents[3]
UNKNOWN_PATH = "/"
"""The guard answers it by itself, whatever Triton does."""


def guard(run_dir: RunDir, settings: Settings) -> Watched:
    """The process, as the supervisor watches it."""
    command = [
        *(sys.executable, "-m", "redraft.serving.guard.server", "--address", settings.address),
        *("--http-port", str(settings.http_port), "--grpc-port", str(settings.grpc_port)),
        *("--metrics-port", str(settings.metrics_port), "--metrics-socket", str(run_dir.metrics_socket)),
        *(argument for name in settings.allowed_hosts for argument in ("--allow-host", name)),
        *("--http-socket", str(run_dir.http_socket), "--grpc-socket", str(run_dir.grpc_socket)),
    ]
    child = Child(
        run_dir,
        "guard",
        "the guard of Triton's ports",
        command,
        run_dir.guard_log,
        dict(os.environ),
        REPOSITORY,
        MAX_DELAY_S,
        MAX_LOG_BYTES,
    )
    return Watched(child, lambda: answers(settings.http_port, UNKNOWN_PATH, (404,)))
