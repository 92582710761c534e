"""What a running service shows to others, and what is left of it after it is stopped or killed: nothing.

Slow, as each test starts services. It would catch a process, a socket or shared memory that a killed service leaves.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from redraft.serving import launcher
from redraft.serving.processes import owned_processes, shared_memory_prefix
from tests.cli.commands import run_command
from tests.conftest import wait_until
from tests.serving.client_side import GrpcStream
from tests.serving.lifecycle.starting import assert_nothing_is_left, serve

pytestmark = pytest.mark.slow


def test_nobody_else_can_read_what_a_service_writes(service):
    """Prompts pass through its sockets, its logs and Triton's shared memory."""
    made = [path for path in service.run_dir.path.rglob("*") if not path.is_symlink()]
    regions = list(Path("/dev/shm").glob(f"{shared_memory_prefix(service.run_dir.path)}*"))
    names = {path.name for path in made}
    assert names > {"worker-0.sock", "worker.log", "triton.log", "supervisor.log", "settings.json", "state.json"}
    assert len(regions) == 4
    readable = [str(path) for path in (*made, *regions) if path.stat().st_mode & 0o077]
    assert readable == []
    status = run_command(["status", "--run-dir", str(service.run_dir.path)])
    assert (status.exit_code, status.output.split()[0]) == (0, "ready")


def test_only_loopback_is_bound_and_nothing_by_triton(service):
    """Requests to any port of its own would not pass the guard."""
    ports = {service.settings.http_port, service.settings.grpc_port, service.settings.metrics_port}
    listening = [
        (connection.laddr.port, connection.laddr.ip.removeprefix("::ffff:"), process.pid)
        for process in owned_processes(service.run_dir.path)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {port for port, _, _ in listening} >= ports
    assert {ip for _, ip, _ in listening} == {"127.0.0.1"}
    assert service.state.triton_pid not in {pid for _, _, pid in listening}


@pytest.mark.parametrize("victims", [["supervisor"], ["supervisor", "worker", "server"]])
def test_stop_leaves_nothing_after_kill_9(service, victims):
    state = service.state
    pids = {"supervisor": state.supervisor_pid, "worker": state.worker_pid, "server": state.triton_pid}
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
    launcher.stop(service.run_dir.path)
    assert_nothing_is_left(service.run_dir.path)
    assert launcher.stop(service.run_dir.path) == 0, "stopping twice is harmless"


def test_a_killed_supervisor_takes_all_with_it_and_serve_starts_anew(service):
    os.kill(service.state.worker_pid, signal.SIGSTOP)
    os.kill(service.state.supervisor_pid, signal.SIGKILL)
    wait_until(lambda: owned_processes(service.run_dir.path) == [])
    assert list(Path("/dev/shm").glob(f"{shared_memory_prefix(service.run_dir.path)}*")) == []
    with pytest.raises(httpx.ConnectError):
        service.ready()
    serve(service.run_dir.path, service.settings)
    assert service.ready()


@pytest.mark.parametrize("field", ["text", "input_ids"])
def test_a_restarted_worker_is_ready_when_each_model_reaches_it(service, fake_bundle, field):
    (fake_bundle / "refuse").write_text(field)
    os.kill(service.state.worker_pid, signal.SIGKILL)
    wait_until(lambda: not service.ready())
    wait_until(lambda: "not yet" in service.run_dir.supervisor_log.read_text().rpartition("degraded")[2])
    assert not service.ready()
    (fake_bundle / "refuse").unlink()
    wait_until(service.ready)
    assert "text_output" in service.generate({"text_input": "hi", "max_tokens": 2})


def test_a_disk_that_fills_up_ends_no_service(service):
    """And with a stream open, it is stopped."""
    log = service.run_dir.supervisor_log
    before = log.read_text().count("degraded")
    (service.run_dir.path / "state.tmp").symlink_to("/dev/full")
    os.kill(service.state.worker_pid, signal.SIGKILL)
    wait_until(lambda: log.read_text().count("degraded") > before)
    wait_until(lambda: "text_output" in service.generate({"text_input": "hi", "max_tokens": 2}))
    wait_until(service.ready)
    stream = GrpcStream(service.grpc)
    stream.send(text_input="slow", max_tokens=400, stream=True)
    stream.receive()
    launcher.stop(service.run_dir.path)
    assert_nothing_is_left(service.run_dir.path)
    stream.close(cancel=True)
    (service.run_dir.path / "state.tmp").unlink()
