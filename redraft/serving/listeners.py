"""The processes that listen for clients, as the supervisor watches them: the guard of Triton's ports, and `/v1`."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Container
from pathlib import Path

from redraft.home import SITE
from redraft.serving.child import Child, Part
from redraft.serving.rundir import RunDir
from redraft.serving.settings import ServeSettings, environment_of

PROBE_S, ANSWER_S = 2.0, 5.0
"""Each is asked every 2 s, and has 5 s to answer."""
GUARD_DELAY_S, FRONT_END_DELAY_S = 1.0, 5.0
"""Most seconds before a restart. The guard loads nothing, and starts in a second."""
FRONT_END_DRAIN_S = 2
"""How long requests to /v1 may go on after SIGTERM."""
MAX_LOG_BYTES = 32 * 2**20
_LOOPBACK = "127.0.0.1"


def guard(run_dir: RunDir, settings: ServeSettings) -> Part:
    """The guard. It answers an unknown path by itself, whatever Triton does."""
    command = [
        *(sys.executable, "-m", "redraft.serving.guard.server", "--metrics-socket", str(run_dir.metrics_socket)),
        *("--http-socket", str(run_dir.open_http), "--grpc-socket", str(run_dir.open_grpc)),
        *("--worker-socket", str(run_dir.socket)),
    ]
    child = _child(run_dir, settings, "guard", "the guard of Triton's ports", command, run_dir.guard_log, GUARD_DELAY_S)
    return Part(child, lambda: answers(settings.http_port, "/", (404,)), PROBE_S)


def front_end(run_dir: RunDir, settings: ServeSettings) -> Part:
    """The front end `/v1`. It follows the links in the run directory to another bundle and its worker."""
    command = [
        *(sys.executable, "-m", "redraft.openai.server", "--bundle", str(run_dir.bundle)),
        *("--socket", str(run_dir.socket), "--log", str(run_dir.openai_log)),
    ]
    child = _child(run_dir, settings, "openai", "the /v1 front end", command, run_dir.openai_log, FRONT_END_DELAY_S)
    return Part(child, lambda: answers(settings.openai_port, "/health", (200, 503)), PROBE_S)


def _child(
    run_dir: RunDir, settings: ServeSettings, part: str, name: str, command: list[str], log: Path, delay: float
) -> Child:
    return Child(run_dir, part, name, command, log, environment_of(settings), SITE, delay, MAX_LOG_BYTES)


def answers(port: int, path: str, statuses: Container[int]) -> bool:
    """Whether what listens at a port of this machine answers with one of these statuses."""
    connection = http.client.HTTPConnection(_LOOPBACK, port, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status in statuses
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
