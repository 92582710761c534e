"""How a service is stopped whose supervisor does not end."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from redraft.plugins.library import BuildError
from redraft.serving import launcher
from redraft.serving.processes import OWNER_VARIABLE, ServingError
from redraft.serving.rundir import RunDir, State
from redraft.serving.settings import ServeSettings
from tests.cli.commands import run_command
from tests.serving.client_side import free_ports


def test_what_a_start_waits_for_imports_no_numpy():
    """The command, the supervisor and the worker import one after the other: numpy is a third of the first two."""
    program = "import sys, redraft.cli.service, redraft.serving.supervisor; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("missing", [False, True])
def test_operators_are_compiled_before_a_worker_has_to_be_ready_in_time(monkeypatch, missing):
    said = list[str]()
    monkeypatch.setattr(launcher, "are_built", lambda: not missing)

    monkeypatch.setattr(launcher, "build_operators", lambda: None)
    launcher._compile_operators(said.append)
    assert said == ["compiling the CPU operators, once for this version"] * missing
    monkeypatch.setattr(launcher, "build_operators", MagicMock(side_effect=BuildError("g++ failed")))
    with pytest.raises(ServingError, match=r"^g\+\+ failed$") if missing else nullcontext():
        launcher._compile_operators(said.append)


def test_a_bundle_is_read_ahead(tmp_path, monkeypatch):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(launcher.os, "posix_fadvise", lambda _, start, size, advice: asked.append((start, size)))
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / "target.weights").write_bytes(bytes(launcher.READ_AHEAD_BYTES + 1))
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")  # who opens it waits for a writer
    length = launcher.READ_AHEAD_BYTES + 1
    monkeypatch.setattr(launcher, "host_bytes", lambda: 2 * length - 1)
    launcher._read_ahead(tmp_path)
    assert not asked, "it would push out of memory what it has read"
    monkeypatch.setattr(launcher, "host_bytes", lambda: 2 * length)
    launcher._read_ahead(tmp_path)
    assert asked == [(0, launcher.READ_AHEAD_BYTES), (launcher.READ_AHEAD_BYTES, launcher.READ_AHEAD_BYTES)]
    monkeypatch.setattr(Path, "rglob", MagicMock(side_effect=OSError))
    launcher._read_ahead(tmp_path)


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


def test_the_state_of_another_version_is_read(tmp_path):
    """Or the service of before an update would be killed in the middle of its requests."""
    run_dir = RunDir(tmp_path)
    run_dir.write_state(State(phase="ready", supervisor_pid=7, settings=ServeSettings(bundle=Path("b"), drain_s=9)))
    content = json.loads(run_dir.state_file.read_text())
    content["settings"] |= {"allowed_hosts": [], "max_queue": None, "learn_gb": 0.01, "learn_redact": [""]}
    run_dir.state_file.write_text(json.dumps(content | {"gone": 1, "rank_pids": {"0": 8}}))
    state = run_dir.read_state()
    assert state
    assert (state.supervisor_pid, state.settings.drain_s, state.rank_pids) == (7, 9, {0: 8})
    for text in ("", "[]", "{}", '{"settings": []}'):
        run_dir.state_file.write_text(text)
        assert run_dir.read_state() is None


def test_a_service_that_cannot_start_is_refused_before_its_bundle_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "TritonInstallation", lambda: None)
    monkeypatch.setattr(launcher, "FREED_S", 0)
    monkeypatch.setattr("redraft.cli.prepare.prepared", lambda _: pytest.fail("it was made"))
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    ports = dict(zip(("http_port", "grpc_port", "metrics_port", "openai_port"), free_ports(4), strict=True))
    launcher.check(ServeSettings(**ports), run_dir.path)

    def refusal(**changes: object) -> str:
        options = {**ports, **changes}.items()
        words = [word for name, value in options for word in (f"--{name.replace('_', '-')}", str(value))]
        done = run_command(["serve", "default", *words, "--run-dir", str(run_dir.path)])
        assert done.exit_code == 1
        return done.output

    with socket.create_server(("127.0.0.1", ports["grpc_port"])):
        assert f"port {ports['grpc_port']} on 127.0.0.1 (gRPC) is in use" in refusal()
    assert "the bundle is for one rank" in refusal(hostfile="hosts")
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} is a file; expected a folder" in refusal(learned_dir=tmp_path / "file" / "learned")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)  # whatever the umask is
    assert "open to other users, and answers are private: `chmod 700` it" in refusal(learn=tmp_path / "open")
    launcher.check(ServeSettings(**ports, learn=tmp_path / "learn"), run_dir.path)
    assert (tmp_path / "learn").stat().st_mode & 0o777 == 0o700
    with run_dir.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"a service is running from {run_dir.path}" in refusal()
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        assert "MPI is missing (mpi4py)" in refusal(tp=2)
    monkeypatch.setattr(launcher, "check_build", MagicMock(side_effect=BuildError("g++ not found")))
    assert "redraft serve: g++ not found" in refusal()


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
