"""Where Triton is found: the wheel's layout, and that of NGC's containers."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from redraft.serving import tritonserver
from redraft.serving.processes import ServingError, owned_processes, shared_memory_prefix
from redraft.serving.rundir import RunDir
from redraft.serving.settings import ServeSettings
from redraft.serving.tritonserver import TritonInstallation

WHEEL = next(Path(sys.prefix).glob("triton/lib/python3.*/site-packages/pytriton/tritonserver"))
STUB = "triton_python_backend_stub"


@pytest.fixture
def container(tmp_path, monkeypatch) -> Path:
    """A server in NGC's layout, with the wheel's stub for this Python, which the environment variable names."""
    home = tmp_path / "tritonserver"
    (home / "backends" / "python").mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "lib").mkdir()
    (home / "bin" / "tritonserver").touch()
    for file in [*(WHEEL / "backends" / "python").iterdir(), *WHEEL.glob(f"python_backend_stubs/3.11/{STUB}")]:
        (home / "backends" / "python" / file.name).symlink_to(file)
    monkeypatch.setenv("REDRAFT_TRITON_SERVER", str(home))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/compat")
    return home


def environment(folder: Path, version: str) -> Path:
    (folder / "lib" / f"python{version}").mkdir(parents=True)
    return folder


def test_the_wheel_is_the_default(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/foreign")
    found = TritonInstallation()
    assert found.server == WHEEL / "bin" / "tritonserver"
    assert found.stub.parts[-2] == f"3.{sys.version_info.minor}"
    assert "nvidia_pytriton.libs" in found.library_path
    assert "/foreign" not in found.library_path


def test_a_server_in_ngcs_layout(container, tmp_path):
    found = TritonInstallation()
    assert found.server == container / "bin" / "tritonserver"
    assert found.stub == container / "backends" / "python" / STUB
    assert found.library_path.split(":")[:2] == [str(container / "lib"), "/usr/local/cuda/compat"]
    run_dir = RunDir(tmp_path / "r")
    tritonserver.prepare(found, run_dir, ServeSettings(bundle=tmp_path))
    laid_out = {file.name for file in (run_dir.backends / "python").iterdir()}
    assert laid_out == {file.name for file in (container / "backends" / "python").iterdir()}
    assert STUB in laid_out
    command = tritonserver.command(found, run_dir)
    assert command[0] == str(container / "bin" / "tritonserver")
    sockets = {"http": run_dir.http_socket, "metrics": run_dir.metrics_socket}
    assert {f"--{name}-address=unix:{path.name}" for name, path in sockets.items()} < set(command)
    assert tritonserver.environment(found, run_dir)["PATH"].startswith(f"{found.environment}/bin:")


def test_a_containers_server_is_found_where_there_is_no_wheel(container, tmp_path, monkeypatch):
    monkeypatch.delenv("REDRAFT_TRITON_SERVER")
    monkeypatch.setattr(tritonserver, "CONTAINER_SERVER", container)
    monkeypatch.setenv("REDRAFT_TRITON_ENV", str(environment(tmp_path / "env", "3.11")))
    assert TritonInstallation().server == container / "bin" / "tritonserver"


def test_an_environment_of_another_python_is_refused(container, tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFT_TRITON_ENV", str(environment(tmp_path / "env", "3.12")))
    message = (
        r"backend runs Python 3\.11, the models' environment .*/env has Python 3\.12: make it anew with python3\.11"
    )
    with pytest.raises(ServingError, match=message):
        TritonInstallation()


@pytest.mark.parametrize(("missing", "name"), [("bin/tritonserver", "tritonserver"), (f"backends/python/{STUB}", STUB)])
def test_what_is_missing_is_named(container, missing, name):
    os.unlink(container / missing)
    with pytest.raises(ServingError, match=f"{name} is missing.*REDRAFT_TRITON_SERVER"):
        TritonInstallation()


def test_nothing_is_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFT_TRITON_ENV", str(tmp_path))
    with pytest.raises(ServingError, match=r"`make setup`.*REDRAFT_TRITON_ENV"):
        TritonInstallation()
    environment(tmp_path, "3.11")
    with pytest.raises(ServingError, match=r"not installed .*pytriton/tritonserver/bin/tritonserver is missing"):
        TritonInstallation()


def test_a_library_that_is_missing_is_named(container, tmp_path, monkeypatch):
    """As ldd prints it for a stub whose libpython is not installed."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "ldd"
    fake.write_text("#!/bin/sh\nprintf '\\tlibpython3.11.so.1.0 => not found\\n'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ServingError, match=r"needs libpython3\.11\.so\.1\.0: .*apt-get install libpython3\.11"):
        TritonInstallation()


@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request"])
@pytest.mark.parametrize("rest", ["Content-Length: 10\r\n\r\nhalf", "Content-Length: 1\r\n\r\n\xff"])
def test_a_server_that_dies_while_it_answers_gives_no_answer(tmp_path, status, rest):
    """The supervisor, which asks, must outlive it."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def answer_in_part() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(f"HTTP/1.1 {status}\r\n{rest}".encode("latin-1"))

        thread = threading.Thread(target=answer_in_part)
        thread.start()
        assert tritonserver.health(path) == 0
        thread.join()


def test_shared_memory_goes_with_the_supervisor(tmp_path, monkeypatch):
    """Its pipe closes where it is killed, too."""
    monkeypatch.setattr(tritonserver, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(tritonserver, "GONE_S", 0)
    run_dir = RunDir(tmp_path / "run dir")
    run_dir.path.mkdir()
    os.mkfifo(run_dir.pipe)
    supervisor = os.open(run_dir.pipe, os.O_RDWR)
    region, other = tmp_path / f"{shared_memory_prefix(run_dir.path)}1", tmp_path / "other"
    for path in (region, other):
        path.touch()
    tritonserver.remove_memory_after(run_dir)
    (process,) = owned_processes(run_dir.path)
    time.sleep(0.2)
    assert region.exists()
    os.close(supervisor)
    process.wait(60)
    assert (region.exists(), other.exists()) == (False, True)
