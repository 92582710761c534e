"""The real Triton Inference Server: where it is, and how it is started.

Its models run in a virtual environment of their own ($REDRAFT_TRITON_ENV, else `<venv>/triton`). The server is that of
the nvidia-pytriton wheel in this environment, or one with NGC's layout: $REDRAFT_TRITON_SERVER, else /opt/tritonserver.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import psutil

from redraft.home import SITE
from redraft.serving.child import Child, Part
from redraft.serving.private_memory import private
from redraft.serving.processes import (
    OWNER_VARIABLE,
    SHARED_MEMORY,
    ServingError,
    check_room,
    remove_shared_memory,
    shared_memory_prefix,
)
from redraft.serving.rundir import RunDir
from redraft.serving.settings import ServeSettings
from redraft.worker.protocol import PROBE

REPOSITORY, REQUIREMENTS = (
    beside if (beside := Path(__file__).with_name(name)).exists() else SITE / name
    for name in ("triton_repo", "requirements-triton.txt")
)
"""Triton's models, and the packages that they need: in a wheel beside this file."""
PYTRITON = "nvidia-pytriton==0.7.0"
"""The wheel that holds the server."""
MODELS = ("ensemble", "tensorrt_llm", "preprocessing", "postprocessing")
STAND_IN = "engine_worker"
"""The model that stands for the engine worker in /v2/health/ready: see `show_worker`."""
WHOLE, BROKEN = "whole", "worker_is_restarting"
"""Its two configurations: one that loads, and one whose backend does not exist."""
EXIT_TIMEOUT_S = 3
HEALTH_S, PROBE_S = 2.0, 2.0
READY, NOT_READY = 200, 400
MAX_FILE_BYTES = 32 * 2**20
"""Size of its log and of each model's shared memory, through which requests pass and which never shrinks again."""
MAX_DELAY_S = 0.5
"""It starts in a second or two, and a single request can end it."""
SHARED_MEMORY_BYTES = 8 * 2**20
"""What its models take of /dev/shm when they start, 1 MiB each, and as much again for large requests."""
GONE_S = 1
"""The server and its models, which the kernel kills with the supervisor, make no more regions so long after it."""
_ENVIRONMENT = f"{sys.prefix}/triton"
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
ADD = (
    "run `make setup`"
    if REPOSITORY.parent == SITE
    else f"add it with: {_PYTHON} -m venv {_ENVIRONMENT} && {_ENVIRONMENT}/bin/pip install -r {REQUIREMENTS} && "
    f"{_ENVIRONMENT}/bin/pip install --no-deps {PYTRITON}"
)
"""How Triton is added to a clone, or to the environment of a wheel."""
SERVER_VARIABLE, ENVIRONMENT_VARIABLE = "REDRAFT_TRITON_SERVER", "REDRAFT_TRITON_ENV"
CONTAINER_SERVER = Path("/opt/tritonserver")
"""Where NGC's containers have the server."""

# They leave nothing in the cache: the next request takes the same slot, whose memory is then there.
_FIRST_REQUESTS = {
    "ensemble": {"text_input": "Hello", "max_tokens": 4, "cache_prompt": False},
    "tensorrt_llm": {"input_ids": [0], "request_output_len": 1, "cache_prompt": False},
}
_TOKEN_REQUESTS: dict[str, list[tuple[str, str, list[int], str | int]]] = {
    "preprocessing": [("QUERY", "BYTES", [1, 1], "Hello"), ("REQUEST_OUTPUT_LEN", "INT32", [1, 1], 1)],
    "postprocessing": [("TOKENS_BATCH", "INT32", [1, 1, 1], 0), ("SEQUENCE_LENGTH", "INT32", [1, 1], 1)],
}
"""Name, type, shape and only element of each input."""
_LIBPYTHON = re.compile(r"libpython(3\.\d+)\.so\S* => (not found)?")


class TritonInstallation:
    """Paths of the server, its Python backend and the models' environment. Raises ServingError where one is missing, or
    where backend and environment are of different Python versions."""

    def __init__(self) -> None:
        self.environment = Path(os.environ.get(ENVIRONMENT_VARIABLE, Path(sys.prefix) / "triton"))
        python = next((self.environment / "lib").glob("python3.*"), None)
        if python is None:
            raise ServingError(
                f"Triton's models have no Python environment at {self.environment}: {ADD}, or set "
                f"{ENVIRONMENT_VARIABLE} to one with the packages of {REQUIREMENTS}"
            )
        version = python.name.removeprefix("python")
        wheel = python / "site-packages" / "pytriton" / "tritonserver"
        named = os.environ.get(SERVER_VARIABLE)
        if not named and (wheel.exists() or not CONTAINER_SERVER.exists()):
            home, stubs = wheel, wheel / "python_backend_stubs" / version
            libraries = [str(python / "site-packages" / "nvidia_pytriton.libs")]
        else:
            home = Path(named) if named else CONTAINER_SERVER
            stubs = home / "backends" / "python"
            libraries = [str(home / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        self.server = home / "bin" / "tritonserver"
        self.backend = home / "backends" / "python"
        self.stub = stubs / "triton_python_backend_stub"
        self.library_path = ":".join([*libraries, str(sysconfig.get_config_var("LIBDIR"))])
        """LD_LIBRARY_PATH of the server and its model processes."""
        for path in (self.server, self.stub):
            if not path.exists():
                raise ServingError(
                    f"Triton is not installed ({path} is missing): {ADD}, or set {SERVER_VARIABLE} to a "
                    "server's folder, such as /opt/tritonserver in NGC's containers"
                )
        self._check_python(version)

    def _check_python(self, version: str) -> None:
        environment = os.environ | {"LD_LIBRARY_PATH": self.library_path}
        result = subprocess.run(["ldd", str(self.stub)], env=environment, capture_output=True, text=True, check=False)
        linked = _LIBPYTHON.search(result.stdout)
        if linked and linked[1] != version:
            raise ServingError(
                f"Triton's Python backend runs Python {linked[1]}, the models' environment {self.environment} has "
                f"Python {version}: make it anew with python{linked[1]}, or set {ENVIRONMENT_VARIABLE} to another"
            )
        if linked and linked[2]:
            raise ServingError(
                f"Triton's Python backend needs libpython{version}.so.1.0: install it "
                f"(Debian: apt-get install libpython{version})"
            )


def prepare(installation: TritonInstallation, run_dir: RunDir, settings: ServeSettings) -> None:
    """Lay out the backend (linked) and the model repository (copied, configuration rendered) in the run directory.

    Raises ServingError where what was there cannot be removed: Triton would run it.
    """
    for folder in (run_dir.backends, run_dir.models, run_dir.stand_ins):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ServingError(f"cannot remove {folder}: {error}; remove it, or choose another --run-dir") from None
    backend = run_dir.backends / "python"
    backend.mkdir(parents=True)
    for source in {*installation.backend.iterdir(), installation.stub}:
        (backend / source.name).symlink_to(source)
    for model in MODELS:
        source, folder = REPOSITORY / model, run_dir.models / model
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").write_text((source / "1" / "model.py").read_text())
        (folder / "1" / "__pycache__").touch()  # a file: bytecode written there would pass for a change of the model
        config = (source / "config.pbtxt").read_text()
        config = config.replace("decoupled: true", f"decoupled: {str(settings.decoupled).lower()}")
        config = config.replace('"${tokenizer_dir}"', json.dumps(run_dir.bundle.name))
        (folder / "config.pbtxt").write_text(config)
    whole = (REPOSITORY / STAND_IN / "config.pbtxt").read_text()
    for name, config in ((WHOLE, whole), (BROKEN, f'backend: "{BROKEN}"')):
        (run_dir.stand_ins / name / "1").mkdir(parents=True)
        (run_dir.stand_ins / name / "config.pbtxt").write_text(config)


def check_shared_memory() -> None:
    """Raises ServingError where /dev/shm has no room for the models: they would not load."""
    remedy = "free some (`ls -l /dev/shm`, `redraft stop` of other services), or make it larger (docker: --shm-size)"
    check_room(SHARED_MEMORY, SHARED_MEMORY_BYTES, "Triton's models", remedy)


def remove_memory_after(run_dir: RunDir) -> None:
    """Start a process that removes the models' shared memory when the supervisor, which keeps `run_dir.pipe` open, has
    ended, however that ends. It is a part of the service: who starts the next one ends it before."""
    script, regions = f'read _; sleep {GONE_S}; rm -f "$0"*', SHARED_MEMORY / shared_memory_prefix(run_dir.path)
    with run_dir.pipe.open("rb", buffering=0) as pipe:
        subprocess.Popen(
            ["/bin/sh", "-c", script, regions],
            stdin=pipe,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {OWNER_VARIABLE: str(run_dir.path)},
            start_new_session=True,
        )


class Triton(Part):
    """The server, and the processes of its models, which it starts. It starts again only while `worker_is_up`: its
    models would wait for the worker."""

    def __init__(
        self, installation: TritonInstallation, run_dir: RunDir, silence_s: float, worker_is_up: Callable[[], bool]
    ):
        self._run_dir, self._worker_is_up, self.silence_s = run_dir, worker_is_up, silence_s
        self._processes: list[psutil.Process] = []
        child = Child(
            run_dir,
            "triton",
            "the Triton server",
            private(command(installation, run_dir)),
            run_dir.triton_log,
            environment(installation, run_dir),
            run_dir.path,
            MAX_DELAY_S,
            MAX_FILE_BYTES,
        )
        super().__init__(child, lambda: models_live(run_dir.http_socket, silence_s / 2), PROBE_S)

    def start(self) -> None:
        """Start the server. Raises ServingError where /dev/shm has no room for its models."""
        remove_shared_memory(self._run_dir.path)
        check_shared_memory()
        clear(self._run_dir)
        super().start()

    def may_start(self) -> bool:
        return self._worker_is_up()

    def processes(self) -> list[psutil.Process]:
        return self._processes

    def bring_up(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self.child.pid)
            self._processes = [server, *server.children()]
        super().bring_up()

    def bring_down(self, failure: str) -> str:
        super().bring_down(failure)
        return f"the Triton server or one of its model processes {failure} and is restarting"


def command(installation: TritonInstallation, run_dir: RunDir) -> list[str]:
    """Command line of the server: it runs in the run directory, listens on sockets there, and loads models from there.

    All paths are relative to it. Triton starts a model's process through a shell, which would run what the run
    directory's own path says.
    """
    grpc_name, _, grpc_port = run_dir.grpc_socket.name.rpartition(":")
    return [
        str(installation.server),
        f"--model-repository={run_dir.models.name}",
        f"--backend-directory={run_dir.backends.name}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in MODELS),
        f"--http-address=unix:{run_dir.http_socket.name}",
        f"--grpc-address=unix:{grpc_name}",
        f"--grpc-port={grpc_port}",
        f"--metrics-address=unix:{run_dir.metrics_socket.name}",
        f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix(run_dir.path)}",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        "--grpc-infer-allocation-pool-size=0",
        "--disable-auto-complete-config",
        "--allow-gpu-metrics=false",
        "--allow-cpu-metrics=false",
    ]


def environment(installation: TritonInstallation, run_dir: RunDir) -> dict[str, str]:
    """Environment of the server and its model processes.

    With one arena glibc gives the memory of a large request back; with several up to half of it stays. For the same
    reason the server keeps no pool of gRPC requests.
    """
    binaries = installation.environment / "bin"
    foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return (
        {"MALLOC_ARENA_MAX": "1"}
        | {name: value for name, value in os.environ.items() if name not in foreign}
        | {
            "LD_LIBRARY_PATH": installation.library_path,
            "PATH": f"{binaries}:{os.environ.get('PATH', os.defpath)}",
            "REDRAFT_PATH": str(SITE),
            "REDRAFT_WORKER_SOCKET": run_dir.socket.name,  # relative: the models' Python takes paths for ASCII
        }
    )


def health(http_socket: Path) -> int:
    """The status of /v2/health/ready: READY, NOT_READY, or another where the server does not answer as it should."""
    return _call(http_socket, "v2/health/ready", None, timeout=HEALTH_S)[0]


def show_worker(run_dir: RunDir, up: bool) -> bool:
    """Have /v2/health/ready say whether the engine worker is up. Returns whether it does.

    Load balancers and Triton's clients ask Triton, over HTTP and gRPC, so it must know; a guard that answered for it
    would not help who reaches Triton's sockets. Triton takes no word on readiness but its models' states: it is not
    ready while a model's last load has failed. The models that serve cannot be unloaded for it, since their streams
    would end. So while the worker is away a stand-in is loaded whose configuration cannot load and says why.
    """
    status, wanted = health(run_dir.http_socket), READY if up else NOT_READY
    if status == wanted:
        return True
    if status not in (READY, NOT_READY):
        return False
    _put_stand_in(run_dir, WHOLE if up else BROKEN)
    # Up: one that loads replaces the failed load, and is unloaded at once, since what has been unloaded does not count
    # unless its last load failed. Down: an unload comes first, since Triton keeps a loaded model whose next load fails,
    # and the unload of the last time may have come late or never.
    for action in ("load", "unload") if up else ("unload", "load"):
        _call(run_dir.http_socket, f"v2/repository/models/{STAND_IN}/{action}", {}, HEALTH_S)
    if up:
        (run_dir.models / STAND_IN).unlink(missing_ok=True)
    return health(run_dir.http_socket) == wanted


def clear(run_dir: RunDir) -> None:
    """Take away what the last server left: its sockets and a stand-in."""
    sockets = run_dir.http_socket, run_dir.grpc_socket, run_dir.metrics_socket
    for path in (*sockets, run_dir.models / STAND_IN):
        path.unlink(missing_ok=True)


def _put_stand_in(run_dir: RunDir, name: str) -> None:
    """Swap in a prepared stand-in by symlink, which takes no space: health is true on a full disk. Triton reloads it
    because its times changed."""
    for path in (run_dir.stand_ins / name, run_dir.stand_ins / name / "config.pbtxt"):
        os.utime(path)
    new = run_dir.stand_ins / "new"
    new.unlink(missing_ok=True)
    new.symlink_to(Path("..", run_dir.stand_ins.name, name))
    new.replace(run_dir.models / STAND_IN)


def send_first_requests(http_socket: Path, timeout: float) -> None:
    """A request to each model that generates: they have connections of their own to the worker, which may be a while in
    the making. Raises ServingError with Triton's message if one fails or takes longer than `timeout` seconds.
    """
    for model, body in _FIRST_REQUESTS.items():
        status, answer = _call(http_socket, f"v2/models/{model}/generate", body, timeout)
        if status != 200:
            raise ServingError(f"the first request to {model} failed: {answer.strip() or 'no answer from Triton'}")


def models_live(http_socket: Path, timeout: float) -> bool:
    """Whether each model answers in that time. Probes do not go on to the worker: how busy that is does not matter."""
    for model, body in _FIRST_REQUESTS.items():
        if _call(http_socket, f"v2/models/{model}/generate", body | {"id": PROBE}, timeout)[0] != 200:
            return False
    for model, inputs in _TOKEN_REQUESTS.items():
        tensors = [
            {"name": name, "datatype": kind, "shape": shape, "data": [value]} for name, kind, shape, value in inputs
        ]
        if _call(http_socket, f"v2/models/{model}/infer", {"id": PROBE, "inputs": tensors}, timeout)[0] != 200:
            return False
    return True


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float):
        super().__init__("triton", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _call(http_socket: Path, path: str, body: dict | None, timeout: float) -> tuple[int, str]:
    """Status and text of an HTTP request (GET without body), status 0 when there is no answer."""
    connection = _Connection(http_socket, timeout)
    try:
        if body is None:
            connection.request("GET", f"/{path}")
        else:
            connection.request("POST", f"/{path}", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, http.client.HTTPException, UnicodeDecodeError):
        return 0, ""
    finally:
        connection.close()
