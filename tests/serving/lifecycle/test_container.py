"""As in a container: the real server in NGC's folder layout, the service in the foreground, ended by SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from redraft.serving import launcher
from redraft.serving.processes import owned_processes
from tests.conftest import wait_until
from tests.serving.client_side import FAKE_WORKER, start

WHEEL = next(Path(sys.prefix).glob("triton/lib/python3.*/site-packages/pytriton/tritonserver"))
FOREGROUND = """
import signal, sys
from pathlib import Path
from redraft.serving.launcher import stay
signal.signal(signal.SIGTERM, signal.default_int_handler)
print("why:", repr(stay(Path(sys.argv[1]), lambda text: print(text, end="", flush=True))))
"""


def test_a_service_in_a_container(run_folder, fake_bundle, tmp_path, monkeypatch):
    home = tmp_path / "tritonserver"
    (home / "backends" / "python").mkdir(parents=True)
    (home / "bin").symlink_to(WHEEL / "bin")
    (home / "lib").symlink_to(WHEEL.parents[1] / "nvidia_pytriton.libs")
    stub = WHEEL / "python_backend_stubs" / f"3.{sys.version_info.minor}" / "triton_python_backend_stub"
    for file in (*(WHEEL / "backends" / "python").iterdir(), stub):
        (home / "backends" / "python" / file.name).symlink_to(file)
    monkeypatch.setenv("REDRAFT_TRITON_SERVER", str(home))

    service = start(run_folder, fake_bundle, worker_command=FAKE_WORKER)
    commands = [process.cmdline()[0] for process in owned_processes(service.run_dir.path)]
    assert str(home / "bin" / "tritonserver") in commands
    assert service.ready()
    assert "text_output" in service.generate({"text_input": "Hello", "max_tokens": 2})

    with (tmp_path / "printed").open("wb") as printed:
        foreground = subprocess.Popen([sys.executable, "-c", FOREGROUND, str(run_folder)], stdout=printed)
    wait_until(lambda: "ready" in (tmp_path / "printed").read_text())
    foreground.send_signal(signal.SIGTERM)
    assert foreground.wait(timeout=60) == 0
    assert (tmp_path / "printed").read_text().endswith("why: ''\n")
    assert owned_processes(service.run_dir.path) == []
    assert not launcher.is_running(service.run_dir)
