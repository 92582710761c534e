"""A service in the foreground, as a container's first process wants it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from redraft.serving import launcher
from redraft.serving.rundir import RunDir

_POLL_S = 0.5


def stay(run_path: Path, on_text: Callable[[str], None]) -> str:
    """Pass the logs of a running service on until it ends; end it at KeyboardInterrupt, at once at a second one.
    Returns why it ended by itself, "" where it was asked to."""
    run_dir = RunDir(run_path)
    files = (run_dir.supervisor_log, run_dir.worker_log, run_dir.triton_log, run_dir.guard_log, run_dir.openai_log)
    logs = dict.fromkeys(files, 0)
    asked = False
    try:
        while launcher.is_running(run_dir):
            _pass_on(logs, on_text)
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        asked = True
    state = run_dir.read_state()
    try:
        launcher.stop(run_path)
    except KeyboardInterrupt:
        launcher.stop(run_path)
    _pass_on(logs, on_text)
    if asked or (state and state.phase == "stopped"):
        return ""
    return (state.error if state else "") or "the supervisor was killed"


def _pass_on(logs: dict[Path, int], on_text: Callable[[str], None]) -> None:
    """What is new in the logs; `logs` says how far each has been read."""
    for log, start in logs.items():
        with contextlib.suppress(OSError), log.open("rb") as file:
            if file.seek(0, os.SEEK_END) < start:
                start = 0  # a new log: the old one was full
            file.seek(start)
            if new := file.read():
                logs[log] = start + len(new)
                on_text(new.decode(errors="replace"))
