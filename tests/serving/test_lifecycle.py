"""Starting and stopping: what is refused, what is left behind (nothing), whatever has been killed.

Slow, as each test starts services. It would catch a process, a socket or shared memory that a killed service leaves.
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
import time
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from redraft import cli
from redraft.console import progress
from redraft.serving import launcher, supervisor, tritonserver
from redraft.serving.processes import ServingError, owned_processes, shared_memory_prefix
from redraft.serving.rundir import RunDir, Settings
from tests.serving.client_side import FAKE_WORKER, GrpcStream, Service, free_ports, start, wait_until

pytestmark = pytest.mark.slow


def settings(bundle: Path, **changes) -> Settings:
    http, grpc, metrics = free_ports(3)
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics}
    return Settings(bundle=bundle, worker_command=FAKE_WORKER, **(ports | changes))


def serve(folder: Path, wanted: Settings) -> list[str]:
    activities: list[str] = []
    launcher.serve(wanted, folder, activities.append)
    return activities


def assert_nothing_is_left(folder: Path) -> None:
    assert owned_processes(folder.resolve()) == []
    assert list(Path("/dev/shm").glob(f"{shared_memory_prefix(folder.resolve())}*")) == []
    assert not RunDir(folder).socket.exists()


@pytest.fixture(scope="module")
def service(run_folder, fake_bundle):
    return start(run_folder, fake_bundle, worker_command=FAKE_WORKER)


def test_a_port_in_use_is_named_before_anything_starts(tmp_path, fake_bundle):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ServingError, match=rf"port {port} .*gRPC.* is in use.*--grpc-port"):
            serve(tmp_path, settings(fake_bundle, grpc_port=port))
    assert_nothing_is_left(tmp_path)


def test_ports_must_differ(tmp_path, fake_bundle):
    wanted = settings(fake_bundle)
    wanted.metrics_port = wanted.http_port
    with pytest.raises(ServingError, match=rf"HTTP {wanted.http_port}, .*expected three different ones"):
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


def test_a_run_directory_is_closed_to_other_users(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    run_dir.settings_file.touch()
    run_dir.path.chmod(0o755)
    run_dir.create()
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    run_dir.path.chmod(0o777)
    with pytest.raises(ServingError, match=r"other users can write to .*/run, and it holds files: empty it, or choose"):
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
        tritonserver.prepare(tritonserver.TritonInstallation(), run_dir, decoupled=True)


def test_a_status_does_not_keep_a_supervisor_from_its_run_directory(tmp_path):
    run_dir = RunDir(tmp_path)
    with run_dir.lock_file.open("w") as other, run_dir.lock_file.open("w") as own:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not launcher.is_running(run_dir), "another status is not a supervisor"
        release = threading.Timer(0.2, fcntl.flock, (other, fcntl.LOCK_UN))
        release.start()
        supervisor._hold(own)
        assert launcher.is_running(run_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_run_directory_of_another_user_is_refused(tmp_path, fake_bundle):
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ServingError, match=r"belongs to another user, .*: choose another with --run-dir"):
        serve(tmp_path, settings(fake_bundle))


def test_no_bundle(tmp_path):
    with pytest.raises(ServingError, match=r"is not a bundle"):
        serve(tmp_path, settings(tmp_path / "nothing"))


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


def test_a_worker_that_takes_too_long_to_start_is_ended(tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps({"endless": True}))
    said = r"(?s)worker was not ready within 2 s; --start-timeout-s gives it more time; .*compiling kernels"
    with pytest.raises(ServingError, match=said):
        serve(tmp_path / "run", settings(bundle, start_timeout_s=2.0))
    assert_nothing_is_left(tmp_path / "run")


def test_a_run_directory_too_deep_for_a_socket(tmp_path, fake_bundle):
    with pytest.raises(ServingError, match=r"too long for a Unix socket.*--run-dir"):
        serve(tmp_path / ("x" * 100), settings(fake_bundle))


def test_a_second_service_in_the_same_place_is_refused(service, fake_bundle):
    with pytest.raises(ServingError, match=r"a service is running from .*redraft stop"):
        serve(service.run_dir.path, settings(fake_bundle))
    assert service.ready()


def test_of_two_serves_at_once_one_is_refused_and_the_other_is_unharmed(tmp_path, fake_bundle):
    program = """
import sys
from pathlib import Path
from redraft.serving import launcher
from redraft.serving.processes import ServingError
from redraft.serving.rundir import Settings

try:
    launcher.serve(Settings.model_validate_json(sys.argv[1]), Path(sys.argv[2]), lambda activity: None)
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
        assert re.fullmatch(r"(another `redraft serve` is starting|a service is running from) .*\n", "".join(errors))
        state = RunDir(tmp_path).read_state()
        assert state is not None
        assert (state.phase, state.worker_restarts, state.triton_restarts) == ("ready", 0, 0)
    finally:
        launcher.stop(tmp_path)
    assert_nothing_is_left(tmp_path)


def test_nobody_else_can_read_what_a_service_writes(service):
    """Prompts pass through its sockets, its logs and Triton's shared memory."""
    made = [path for path in service.run_dir.path.rglob("*") if not path.is_symlink()]
    regions = list(Path("/dev/shm").glob(f"{shared_memory_prefix(service.run_dir.path)}*"))
    names = {path.name for path in made}
    assert names > {"worker.sock", "worker.log", "triton.log", "supervisor.log", "settings.json", "state.json"}
    assert len(regions) == 2
    readable = [str(path) for path in (*made, *regions) if path.stat().st_mode & 0o077]
    assert readable == []
    status = redraft("status", "--run-dir", str(service.run_dir.path))
    assert (status.wait(60), status.communicate()[0].split()[0]) == (0, "ready")


def test_only_loopback_is_bound(service):
    ports = {service.settings.http_port, service.settings.grpc_port, service.settings.metrics_port}
    listening = [
        (connection.laddr.port, connection.laddr.ip.removeprefix("::ffff:"))
        for process in owned_processes(service.run_dir.path)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {port for port, _ in listening} >= ports
    assert {ip for _, ip in listening} == {"127.0.0.1"}


def ensure_running(service: Service) -> None:
    if not launcher.is_running(service.run_dir):
        serve(service.run_dir.path, service.settings)


@pytest.mark.parametrize("victims", [["supervisor"], ["supervisor", "worker", "server"], ["supervisor", "server"]])
def test_stop_leaves_nothing_after_kill_9(service, victims):
    ensure_running(service)
    state = service.state
    pids = {"supervisor": state.supervisor_pid, "worker": state.worker_pid, "server": state.triton_pid}
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
    launcher.stop(service.run_dir.path)
    assert_nothing_is_left(service.run_dir.path)
    assert launcher.stop(service.run_dir.path) == 0, "stopping twice is harmless"


def test_a_killed_supervisor_takes_all_with_it_and_serve_starts_anew(service):
    ensure_running(service)
    os.kill(service.state.worker_pid, signal.SIGSTOP)
    os.kill(service.state.supervisor_pid, signal.SIGKILL)
    wait_until(lambda: owned_processes(service.run_dir.path) == [])
    with pytest.raises(httpx.ConnectError):
        service.ready()
    serve(service.run_dir.path, service.settings)
    assert service.ready()


@pytest.mark.parametrize("field", ["text", "input_ids"])
def test_a_restarted_worker_is_ready_when_each_model_reaches_it(service, fake_bundle, field):
    ensure_running(service)
    (fake_bundle / "refuse").write_text(field)
    os.kill(service.state.worker_pid, signal.SIGKILL)
    wait_until(lambda: not service.ready())
    wait_until(lambda: "not yet" in service.run_dir.supervisor_log.read_text().rpartition("degraded")[2])
    assert not service.ready()
    (fake_bundle / "refuse").unlink()
    wait_until(service.ready)
    assert "text_output" in service.generate({"text_input": "hi", "max_tokens": 2})


def test_a_disk_that_fills_up_ends_no_service(service):
    ensure_running(service)
    (service.run_dir.path / "state.tmp").symlink_to("/dev/full")
    os.kill(service.state.worker_pid, signal.SIGKILL)
    wait_until(lambda: "degraded" in service.run_dir.supervisor_log.read_text())
    wait_until(lambda: "text_output" in service.generate({"text_input": "hi", "max_tokens": 2}))
    wait_until(service.ready)
    assert "text_output" in service.generate({"text_input": "hi", "max_tokens": 2})
    launcher.stop(service.run_dir.path)
    assert_nothing_is_left(service.run_dir.path)
    (service.run_dir.path / "state.tmp").unlink()


def test_stop_with_an_open_stream(service):
    ensure_running(service)
    stream = GrpcStream(service.grpc)
    stream.send(text_input="slow", max_tokens=400, stream=True)
    stream.receive()
    launcher.stop(service.run_dir.path)
    assert_nothing_is_left(service.run_dir.path)
    stream.close(cancel=True)


def redraft(*arguments: str, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "redraft.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def test_the_command_line(tmp_path, fake_bundle):
    port = free_ports(1)[0]
    status = redraft("status", "--run-dir", str(tmp_path))
    assert (status.wait(20), status.communicate()[0]) == (1, "not running\n")
    failed = redraft("serve", "--bundle", str(tmp_path / "none"), "--run-dir", str(tmp_path), "--http-port", str(port))
    assert failed.wait(20) == 1
    assert "is not a bundle" in failed.communicate()[0]
    stop = redraft("stop", "--run-dir", str(tmp_path))
    assert (stop.wait(20), stop.communicate()[0]) == (0, "nothing was running\n")


def test_a_start_that_takes_long_is_seen_in_a_log(tmp_path, fake_bundle, monkeypatch):
    def slow(wanted: Settings, folder: Path, on_progress) -> None:
        on_progress("loading a large bundle")
        time.sleep(1.0)
        raise ServingError("enough")

    monkeypatch.setattr(progress, "LINE_S", 0.1)
    monkeypatch.setattr(launcher, "serve", slow)
    done = CliRunner().invoke(cli.app, ["serve", "--bundle", str(fake_bundle), "--run-dir", str(tmp_path)])
    assert done.output.count("loading a large bundle") > 3


@pytest.mark.parametrize("damage", ["missing", "{"])
def test_a_running_service_without_its_state(tmp_path, damage):
    """One line, with the remedy."""
    run_dir = RunDir(tmp_path)
    if damage != "missing":
        run_dir.state_file.write_text(damage)
    with run_dir.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (["status"], ["generate", "hi"]):
            done = CliRunner().invoke(cli.app, [*command, "--run-dir", str(tmp_path)])
            assert done.exit_code == 1
            assert "state.json is missing or damaged: if it stays so, `redraft stop`" in done.output
            assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("command", ["status", "stop", "serve", "generate"])
@pytest.mark.parametrize("place", ["file", "file/below", "circle"])
def test_a_run_directory_that_is_a_file(tmp_path, fake_bundle, command, place):
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    arguments = {"serve": ["--bundle", str(fake_bundle)], "generate": ["hi"]}.get(command, [])
    done = CliRunner().invoke(cli.app, [command, *arguments, "--run-dir", str(tmp_path / place)])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert re.fullmatch(r"redraft.*cannot use the run directory .*--run-dir.*\n", done.output)


@pytest.mark.parametrize("command", [["status"], ["stop"], ["generate", "hi"]])
def test_another_users_service(service, monkeypatch, command):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    done = CliRunner().invoke(cli.app, [*command, "--run-dir", str(service.run_dir.path)])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert re.fullmatch(r"redraft.*belongs to another user, and only that user sees and stops its.*\n", done.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hi", "--max-tokens", "4294967297"], "--max-tokens"),
        (["generate", "hi", "--seed", str(2**64)], "--seed"),
        (["serve", "--bundle", "b", "--start-timeout-s", "inf"], "--start-timeout-s"),
        (["serve", "--bundle", "b", "--silence-s", "nan"], "--silence-s"),
        (["serve", "--bundle", "b", "--triton-silence-s", "0"], "--triton-silence-s"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_option(arguments, message):
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_generate_prints_the_answer_and_a_line_of_statistics(service):
    ensure_running(service)
    arguments = ["generate", "--no-chat", "hi", "--max-tokens", "3", "--run-dir", str(service.run_dir.path)]
    done = CliRunner().invoke(cli.app, arguments)
    assert (done.exit_code, done.stdout) == (0, " w0é w1é w2é\n")
    assert re.fullmatch(r"3 tokens in .* tokens/step, .* drafted tokens accepted\n", done.stderr)


def test_what_generate_cannot_send(service):
    ensure_running(service)
    for arguments, message in (
        (["hi"], "no chat_template.jinja .*--no-chat"),
        (["--no-chat", "\udcff"], "not valid UTF-8"),
        (["--no-chat", "hi", "--temperature", "nan"], "generate: temperature: .*got nan"),
    ):
        done = CliRunner().invoke(cli.app, ["generate", *arguments, "--run-dir", str(service.run_dir.path)])
        assert (done.exit_code, type(done.exception)) == (1, SystemExit)
        assert re.search(message, done.output)


def test_ctrl_c_while_starting_leaves_nothing(tmp_path, fake_bundle, monkeypatch):
    """The signal comes while the launcher waits, when tritonserver runs."""

    def interrupted(run_dir: RunDir, *_) -> None:
        wait_until(lambda: (state := run_dir.read_state()) is not None and state.triton_pid > 0)
        signal.default_int_handler(signal.SIGINT, None)

    monkeypatch.setattr(launcher, "_follow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launcher.serve(settings(fake_bundle), tmp_path, lambda activity: None)
    assert_nothing_is_left(tmp_path)
