"""How a service is stopped whose supervisor does not end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from redraft.serving import launcher
from redraft.serving.processes import OWNER_VARIABLE, ServingError
from redraft.serving.rundir import RunDir, State
from redraft.serving.settings import ServeSettings


@pytest.mark.parametrize(
    ("new", "old", "same"),
    [("a", "a", True), (None, None, True), ("a", "b", False), ("a", None, False), (None, "a", False)],
)
def test_a_bundle_with_another_tokenizer_or_none_is_refused(tmp_path, new, old, same):
    for folder, content in (("new", new), ("old", old)):
        (tmp_path / folder).mkdir()
        if content is not None:
            (tmp_path / folder / "tokenizer.json").write_text(content)
    with nullcontext() if same else pytest.raises(ServingError, match="has another tokenizer"):
        launcher._check_tokenizer(tmp_path / "new", tmp_path / "old")


@pytest.mark.parametrize(("phase", "seconds", "status"), [("ready", 60, -signal.SIGKILL), ("stopping", 0.8, 0)])
def test_only_a_supervisor_that_is_stopping_gets_the_time_of_its_requests(
    tmp_path, monkeypatch, phase, seconds, status
):
    """One that hangs is killed after STOP_S: whoever stops the service does not wait for requests of nobody."""
    monkeypatch.setattr(launcher, "STOP_S", 0.2)
    run_dir = RunDir(tmp_path)
    environment = os.environ | {OWNER_VARIABLE: str(run_dir.path)}
    hangs = (
        "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); print(flush=True); "
        f"signal.sigwait({{signal.SIGTERM}}); time.sleep({seconds})"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", hangs], env=environment, stdout=subprocess.PIPE)
    assert supervisor.stdout
    assert supervisor.stdout.readline()
    state = State(phase=phase, supervisor_pid=supervisor.pid, settings=ServeSettings(bundle=Path("b"), drain_s=60))
    run_dir.write_state(state)
    assert launcher.stop(run_dir.path) == 1
    assert supervisor.wait(60) == status
