"""Starting: what is refused, with the remedy, before anything runs.

The slow cases start services. They would catch a start that fails and leaves processes, and a second service
in a run directory that has one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from redraft.serving import launcher, tritonserver
from redraft.serving.listeners import answers
from redraft.serving.processes import ServingError, end_processes, owned_processes
from redraft.serving.rundir import RunDir, hold
from redraft.serving.settings import ServeSettings
from tests.conftest import wait_until
from tests.serving.client_side import Service
from tests.serving.lifecycle.starting import assert_nothing_is_left, serve, settings


@pytest.mark.parametrize(("field", "name"), [("grpc_port", "gRPC"), ("openai_port", "OpenAI")])
def test_a_port_in_use_is_named_before_anything_starts(tmp_path, fake_bundle, field, name):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        option = field.replace("_", "-")
        with pytest.raises(ServingError, match=rf"port {port} .*{name}.* is in use.*--{option}"):
            serve(tmp_path, settings(fake_bundle, **{field: port}))
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("field", ["metrics_port", "openai_port"])
def test_ports_must_differ(tmp_path, fake_bundle, field):
    wanted = settings(fake_bundle)
    wanted = wanted.model_copy(update={field: wanted.http_port})
    with pytest.raises(ServingError, match=rf"HTTP {wanted.http_port}, .*expected different ones"):
        serve(tmp_path, wanted)


def test_a_full_disk_is_named(tmp_path, fake_bundle):
    (tmp_path / "settings.json").symlink_to("/dev/full")
    with pytest.raises(ServingError, match=r"cannot write .*settings.json: No space left"):
        serve(tmp_path, settings(fake_bundle))
    (tmp_path / "settings.json").unlink()
    (tmp_path / "state.tmp").symlink_to("/dev/full")
    with pytest.raises(ServingError, match=r"cannot write .*state.json: No space left"):
        serve(tmp_path, settings(fake_bundle))
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("module", "limit", "message"),
    [
        (launcher, "DISK_BYTES", r"{folder} has no room for settings, state and logs: .*; free some, .*--run-dir"),
        (tritonserver, "SHARED_MEMORY_BYTES", r"/dev/shm has no room for Triton's models: .*; free some .*--shm-size"),
    ],
)
def test_too_little_room_is_named_before_anything_starts(tmp_path, fake_bundle, monkeypatch, module, limit, message):
    monkeypatch.setattr(module, limit, 2**60)
    with pytest.raises(ServingError, match=message.format(folder=tmp_path)):
        serve(tmp_path, settings(fake_bundle))
    assert list(tmp_path.iterdir()) == []
    assert_nothing_is_left(tmp_path)


def test_a_run_directory_is_closed_to_other_users(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    run_dir.settings_file.touch()
    run_dir.path.chmod(0o755)
    run_dir.create()
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    run_dir.path.chmod(0o777)
    with pytest.raises(ServingError, match=r"other users can write to .*/run"):
        run_dir.create()
    run_dir.settings_file.rename(run_dir.path / "novel")
    run_dir.path.chmod(0o755)
    with pytest.raises(ServingError, match=r"run is open to other users and holds other files: `chmod 700` it, or"):
        run_dir.create()
    assert run_dir.path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(("mode", "fits"), [(0o757, False), (0o1777, True), (0o755, True)])
def test_a_run_directory_that_others_can_move_away_is_refused(tmp_path, mode, fits):
    """Renamed, with one of theirs in its place, whose models Triton would run."""
    parent = tmp_path / "up"  # short, as the socket's path must be
    parent.mkdir()
    parent.chmod(mode)
    with contextlib.nullcontext() if fits else pytest.raises(ServingError, match=rf"{parent} is theirs, or they can"):
        RunDir(parent / "x" / "run").create()
    assert (parent / "x").exists() == fits


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_run_directory_below_another_users_is_refused(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ServingError, match=rf"{tmp_path} is theirs, .*; choose another with --run-dir"):
        run_dir.create()


def test_a_model_that_cannot_be_removed_is_not_run(tmp_path):
    """Here by its owner, who may be another; root may remove all but a link."""
    run_dir = RunDir(tmp_path)
    (tmp_path / "planted").mkdir()
    run_dir.models.symlink_to(tmp_path / "planted")
    with pytest.raises(ServingError, match=r"cannot remove .*/models: .*--run-dir"):
        tritonserver.prepare(tritonserver.TritonInstallation(), run_dir, ServeSettings(bundle=tmp_path))


def test_a_status_does_not_keep_a_supervisor_from_its_run_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("redraft.serving.rundir._LOCK_S", 60.0)
    run_dir = RunDir(tmp_path)
    with run_dir.lock_file.open("w") as other, run_dir.lock_file.open("w") as own:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not launcher.is_running(run_dir), "another status is not a supervisor"
        release = threading.Timer(0.2, fcntl.flock, (other, fcntl.LOCK_UN))
        release.start()
        hold(own)
        assert launcher.is_running(run_dir)


def test_a_supervisor_that_was_killed_holds_its_lock_a_moment_longer(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "FREED_S", 60.0)
    run_dir = RunDir(tmp_path)
    with run_dir.lock_file.open("w") as dying:
        fcntl.flock(dying, fcntl.LOCK_EX)
        threading.Timer(0.2, fcntl.flock, (dying, fcntl.LOCK_UN)).start()
        launcher._check_free(run_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_run_directory_of_another_user_is_refused(tmp_path, fake_bundle):
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ServingError, match=r"belongs to another user, .*: choose another with --run-dir"):
        serve(tmp_path, settings(fake_bundle))


def test_no_bundle(tmp_path):
    with pytest.raises(ServingError, match=r"is not a bundle"):
        serve(tmp_path, settings(tmp_path / "nothing"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"), [("broken", "bundle is broken.*build it again"), ("fragile", "the engine cannot execute")]
)
def test_a_worker_that_does_not_start_shows_the_end_of_its_log(tmp_path, fault, message):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps({fault: True}))
    with pytest.raises(ServingError, match=rf"(?s)worker ended with status 1.*{message}"):
        serve(tmp_path / "run", settings(bundle))
    assert_nothing_is_left(tmp_path / "run")


@pytest.mark.slow
def test_a_worker_that_takes_too_long_to_start_is_ended(tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text("{}")
    endless = ["sh", "-c", "echo compiling kernels; exec sleep 60"]
    said = r"(?s)worker was not ready within 2 s; --start-timeout-s gives it more time; .*compiling kernels"
    with pytest.raises(ServingError, match=said):
        serve(tmp_path / "run", settings(bundle, worker_command=endless, start_timeout_s=2.0))
    assert_nothing_is_left(tmp_path / "run")


def test_a_run_directory_too_deep_for_a_socket(tmp_path, fake_bundle):
    with pytest.raises(ServingError, match=r"too long for a Unix socket.*--run-dir"):
        serve(tmp_path / ("x" * 100), settings(fake_bundle))


def test_a_path_that_is_not_utf_8_is_refused(tmp_path, fake_bundle):
    """ServeSettings are written as JSON."""
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.symlink_to(fake_bundle)
    assert settings(odd).bundle.resolve() == fake_bundle, "a link of such a name is fine"
    odd.unlink()
    odd.mkdir()
    (odd / "config.json").write_text("{}")
    for run_dir, given in (
        (odd, settings(fake_bundle)), (tmp_path / "run", settings(odd)),
        (tmp_path / "run", settings(fake_bundle, hostfile=odd / "hosts")),
    ):  # fmt: skip
        with pytest.raises(ServingError, match=r"is not UTF-8: '.*udcff"):
            serve(run_dir, given)


@pytest.mark.slow
def test_a_second_service_in_the_same_place_is_refused(service, fake_bundle):
    with pytest.raises(ServingError, match=r"a service is running from .*redraft stop"):
        serve(service.run_dir.path, settings(fake_bundle))
    assert service.ready()


@pytest.mark.slow
def test_of_two_serves_at_once_one_is_refused_and_the_other_is_unharmed(tmp_path, fake_bundle):
    program = """
import sys
from pathlib import Path
from redraft.serving import launcher
from redraft.serving.processes import ServingError
from redraft.serving.settings import ServeSettings

try:
    launcher.serve(ServeSettings.model_validate_json(sys.argv[1]), Path(sys.argv[2]), lambda activity: None)
except ServingError as error:
    sys.exit(str(error))
"""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, settings(fake_bundle).model_dump_json(), str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in both]
        assert sorted(process.returncode for process in both) == [0, 1], errors
        assert re.fullmatch(
            r"(another `redraft serve` or `redraft swap` is at work in|a service is running from) .*\n", "".join(errors)
        )
        state = RunDir(tmp_path).read_state()
        assert state is not None
        assert (state.phase, state.worker_restarts, state.triton_restarts) == ("ready", 0, 0)
    finally:
        launcher.stop(tmp_path)
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_a_server_that_is_up_before_the_worker_is_not_ready_and_its_death_is_told_at_once(tmp_path, dies):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text("{}")
    (bundle / "away").touch()
    wanted, run_dir = settings(bundle), RunDir(tmp_path / "run")
    ended: list[str] = []

    def start() -> None:
        try:
            serve(run_dir.path, wanted)
        except ServingError as error:
            ended.append(str(error))

    service, starting = Service(wanted, run_dir), threading.Thread(target=start)
    starting.start()
    try:
        wait_until(lambda: tritonserver.health(run_dir.http_socket) == tritonserver.READY)
        wait_until(lambda: answers(wanted.http_port, "/", (404,)))
        assert not service.ready()
        if dies:
            end_processes(owned_processes(run_dir.path, "triton"), grace=0)
            starting.join(60)
            assert "the Triton server was killed by signal 9" in ended[0]
            return
        (bundle / "away").unlink()
        wait_until(service.ready)
        assert service.generate({"text_input": "hi", "max_tokens": 2})["text_output"]
    finally:
        (bundle / "away").unlink(missing_ok=True)
        starting.join()
        launcher.stop(run_dir.path)
    assert not ended
    assert_nothing_is_left(run_dir.path)


@pytest.mark.slow
def test_ctrl_c_while_starting_leaves_nothing(tmp_path, fake_bundle, monkeypatch):
    """The signal comes while the launcher waits, when tritonserver runs."""

    def interrupted(run_dir: RunDir, *_) -> None:
        wait_until(lambda: (state := run_dir.read_state()) is not None and state.triton_pid > 0)
        signal.default_int_handler(signal.SIGINT, None)

    monkeypatch.setattr(launcher, "_follow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launcher.serve(settings(fake_bundle), tmp_path, lambda activity: None)
    assert_nothing_is_left(tmp_path)
