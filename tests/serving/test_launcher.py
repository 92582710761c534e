"""How a service is stopped whose supervisor does not end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from redraft.serving import launcher
from redraft.serving.processes import OWNER_VARIABLE
from redraft.serving.rundir import RunDir, Settings, State


@pytest.mark.parametrize(("phase", "status"), [("ready", -signal.SIGKILL), ("stopping", 0)])
def test_only_a_supervisor_that_is_stopping_gets_the_time_of_its_requests(tmp_path, monkeypatch, phase, status):
    """One that hangs is killed after STOP_S: whoever stops the service does not wait for requests of nobody."""
    monkeypatch.setattr(launcher, "STOP_S", 0.2)
    run_dir = RunDir(tmp_path)
    environment = os.environ | {OWNER_VARIABLE: str(run_dir.path)}
    supervisor = subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 0.8"], env=environment)
    state = State(phase=phase, supervisor_pid=supervisor.pid, settings=Settings(bundle=Path("b"), drain_s=60))
    run_dir.write_state(state)
    assert launcher.stop(run_dir.path) == 1
    assert supervisor.wait(60) == status
