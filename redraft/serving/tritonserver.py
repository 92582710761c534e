"""The real Triton Inference Server from the nvidia-pytriton wheel: where it is, and how it is started.

It lives in a virtual environment of its own (`<venv>/triton`, made by `make setup`): its Python backend needs numpy 1
and runs the models in that environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from pathlib import Path

from redraft.serving.processes import ServingError, shared_memory_prefix
from redraft.serving.rundir import RunDir, Settings

REPOSITORY = Path(__file__).resolve().parents[2] / "triton_repo"
MODELS = ("ensemble", "tensorrt_llm", "engine_worker")
EXIT_TIMEOUT_S = 3

_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_LIBPYTHON = "libpython3.11.so.1.0"


class TritonInstallation:
    """Paths inside Triton's environment. Raises ServingError if it is not complete."""

    def __init__(self, environment: Path | None = None):
        self.environment = environment or Path(os.environ.get("REDRAFT_TRITON_ENV", Path(sys.prefix) / "triton"))
        packages = self.environment / "lib" / "python3.11" / "site-packages"
        home = packages / "pytriton" / "tritonserver"
        self.server = home / "bin" / "tritonserver"
        self.backend = home / "backends" / "python"
        self.stub = home / "python_backend_stubs" / "3.11" / "triton_python_backend_stub"
        self.libraries = packages / "nvidia_pytriton.libs"
        for path in (self.server, self.stub):
            if not path.exists():
                raise ServingError(f"Triton is not installed ({path} is missing): run `make setup`")
        self._check_libpython()

    @property
    def library_path(self) -> str:
        """Value of LD_LIBRARY_PATH for the server and its model processes."""
        return f"{self.libraries}:{sysconfig.get_config_var('LIBDIR')}"

    def _check_libpython(self) -> None:
        environment = os.environ | {"LD_LIBRARY_PATH": self.library_path}
        found = subprocess.run(["ldd", str(self.stub)], env=environment, capture_output=True, text=True, check=False)
        if f"{_LIBPYTHON} => not found" in found.stdout:
            raise ServingError(
                f"Triton's Python backend needs {_LIBPYTHON}: install it (Debian: apt-get install libpython3.11)"
            )


def prepare(installation: TritonInstallation, run_dir: RunDir, decoupled: bool) -> None:
    """Lay out the backend and the model repository (code linked, configuration rendered) in the run directory."""
    for folder in (run_dir.backends, run_dir.models):
        shutil.rmtree(folder, ignore_errors=True)
    backend = run_dir.backends / "python"
    backend.mkdir(parents=True)
    for source in [*installation.backend.iterdir(), installation.stub]:
        (backend / source.name).symlink_to(source)
    for model in MODELS:
        folder = run_dir.models / model
        folder.mkdir(parents=True)
        (folder / "1").symlink_to(REPOSITORY / model / "1")
        config = (REPOSITORY / model / "config.pbtxt").read_text()
        (folder / "config.pbtxt").write_text(config.replace("decoupled: true", f"decoupled: {str(decoupled).lower()}"))


def command(installation: TritonInstallation, run_dir: RunDir, settings: Settings) -> list[str]:
    """Command line of the server."""
    return [
        str(installation.server),
        f"--model-repository={run_dir.models}",
        f"--backend-directory={run_dir.backends}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in MODELS),
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
        f"--http-port={settings.http_port}",
        f"--grpc-port={settings.grpc_port}",
        f"--metrics-port={settings.metrics_port}",
        f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix(run_dir.path)}",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        "--disable-auto-complete-config",
        "--allow-gpu-metrics=false",
        "--allow-cpu-metrics=false",
    ]


def environment(installation: TritonInstallation, run_dir: RunDir) -> dict[str, str]:
    """Environment of the server and its model processes."""
    binaries = installation.environment / "bin"
    foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in foreign} | {
        "LD_LIBRARY_PATH": installation.library_path,
        "PATH": f"{binaries}:{os.environ.get('PATH', os.defpath)}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "REDRAFT_WORKER_SOCKET": str(run_dir.socket),
    }


def is_ready(http_port: int) -> bool:
    """What /v2/health/ready says."""
    return _call(http_port, "v2/health/ready", None)[0] == 200


def set_worker_ready(http_port: int, ready: bool) -> None:
    """Make /v2/health/ready say whether the engine worker is there.

    Triton is not ready while a model has failed to load, and a model that was unloaded does not count. So the model
    `engine_worker` is loaded as it stands in the repository, or with a configuration that cannot load and says why.
    """
    model = "v2/repository/models/engine_worker"
    if ready:
        _call(http_port, f"{model}/load", {})
        return
    _call(http_port, f"{model}/unload", {})
    _call(http_port, f"{model}/load", {"parameters": {"config": json.dumps({"backend": "worker_is_restarting"})}})


def complete(http_port: int, text: str, max_tokens: int, timeout: float) -> str:
    """Text that the service generates after `text`. Raises ServingError with Triton's message."""
    status, body = _call(
        http_port, "v2/models/ensemble/generate", {"text_input": text, "max_tokens": max_tokens}, timeout
    )
    answer = json.loads(body) if status == 200 else {}
    if "text_output" not in answer:
        raise ServingError(f"the first request failed: {body.strip() or 'no answer from Triton'}")
    return answer["text_output"]


def _call(http_port: int, path: str, body: dict | None, timeout: float = 10) -> tuple[int, str]:
    """Status and text of an HTTP request (GET without body), status 0 when there is no answer."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with _HTTP.open(f"http://127.0.0.1:{http_port}/{path}", data, timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""
