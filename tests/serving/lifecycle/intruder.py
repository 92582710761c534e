"""What another user of the machine can try against a running service.

`python -m tests.serving.lifecycle.intruder HTTP_PORT GRPC_PORT RUN_DIR TRITON_PID MARKER`, started by root, becomes
`nobody` and prints what it could do, one line each. MARKER is a file that the model which it brings would write.
"""

from __future__ import annotations

import base64
import encodings.idna  # noqa: F401 (a lookup imports it, when it may be out of reach)
import http.client
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2 as pb

NOBODY = 65534


def http_status(port: int, method: str, path: str, body: bytes = b"") -> int:
    """Status of a raw request, 0 for none. A body goes as a web page's form does, without a preflight."""
    lines = [f"{method} /v2/{path} HTTP/1.1".encode(), b"Host: x", b"Content-Type: text/plain"]
    lines += [b"Content-Length: %d" % len(body)]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"\r\n".join([*lines, b"", body]))
        response = http.client.HTTPResponse(connection)
        try:
            response.begin()
        except (http.client.HTTPException, OSError):
            return 0
        return response.status


def grpc_succeeds(port: int, method: str, message: bytes) -> bool:
    """Whether a call ends without an error."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(message, timeout=10)
        except grpc.RpcError:
            return False
        return True


def http_attacks(port: int, marker: str) -> Iterator[str]:
    model = f"open({marker!r}, 'w').close()\n"
    config = json.dumps({"backend": "python"})
    files = {"file:1/model.py": base64.b64encode(model.encode()).decode()}
    load = json.dumps({"parameters": {"config": config, **files}}).encode()
    region = json.dumps({"key": "/stolen", "offset": 0, "byte_size": 64}).encode()
    requests = [
        ("POST", "repository/models/stolen/load", load),
        ("POST", "repository/models/ensemble/load", b"{}"),
        ("POST", "repository/models/ensemble/unload", b"{}"),
        ("POST", "repository/index", b"{}"),
        ("POST", "systemsharedmemory/region/x/register", region),
        ("GET", "systemsharedmemory/status", b""),
        ("GET", "cudasharedmemory/status", b""),
        ("GET", "logging", b""),
        ("POST", "logging", b'{"log_verbose_level": 9}'),
        ("GET", "trace/setting", b""),
        ("POST", "models/ensemble/trace/setting", b'{"trace_level": ["TIMESTAMPS"]}'),
    ]
    for method, path, body in requests:
        if http_status(port, method, path, body) == 200:
            yield f"HTTP {method} {path}"


def grpc_attacks(port: int, marker: str) -> Iterator[str]:
    load = pb.RepositoryModelLoadRequest(model_name="stolen")
    load.parameters["config"].string_param = json.dumps({"backend": "python"})
    load.parameters["file:1/model.py"].bytes_param = f"open({marker!r}, 'w').close()\n".encode()
    messages = {
        "RepositoryModelLoad": load,
        "RepositoryModelUnload": pb.RepositoryModelUnloadRequest(model_name="ensemble"),
        "RepositoryIndex": pb.RepositoryIndexRequest(),
        "SystemSharedMemoryRegister": pb.SystemSharedMemoryRegisterRequest(name="x", key="/stolen", byte_size=64),
        "SystemSharedMemoryStatus": pb.SystemSharedMemoryStatusRequest(),
        "CudaSharedMemoryStatus": pb.CudaSharedMemoryStatusRequest(),
        "LogSettings": pb.LogSettingsRequest(),
        "TraceSetting": pb.TraceSettingRequest(),
    }
    for method, message in messages.items():
        if grpc_succeeds(port, method, message.SerializeToString()):
            yield f"gRPC {method}"


def file_attacks(run_dir: Path) -> Iterator[str]:
    for name in ("", "state.json", "worker.log", "models/ensemble/1/model.py"):
        if os.access(run_dir / name, os.R_OK) or os.access(run_dir / name, os.W_OK):
            yield f"access to {run_dir / name}"
    for name in ("worker.sock", "http.sock", "grpc.sock:1", "metrics.sock"):
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(run_dir / name))
            yield f"a connection to {name}"
        except OSError:
            pass


def plant_shared_memory(triton: int) -> None:
    """Put a folder under a name that the supervisor cleans up: the prefix is in the server's command line."""
    found = re.search(rb"shm-region-prefix-name=([^\0]+)", Path(f"/proc/{triton}/cmdline").read_bytes())
    assert found
    Path("/dev/shm", f"{found[1].decode()}x").mkdir()


def main(http_port: int, grpc_port: int, run_dir: Path, triton: int, marker: str) -> None:
    """Print what succeeds, after a line that shows that what is meant for everybody works."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    everybody = [http_status(http_port, "GET", path) for path in ("health/ready", "models/ensemble", "models/stats")]
    body = b'{"text_input": "hi", "max_tokens": 2}'
    everybody.append(http_status(http_port, "POST", "models/ensemble/generate", body))
    print("everybody", *everybody, grpc_succeeds(grpc_port, "ServerReady", b""))
    plant_shared_memory(triton)
    for attack in (
        *http_attacks(http_port, marker),
        *grpc_attacks(grpc_port, marker),
        *file_attacks(run_dir),
    ):
        print(attack)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
