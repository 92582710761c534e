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
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from tritonclient.grpc import service_pb2 as pb

NOBODY = 65534
SERVICE = b"/inference.GRPCInferenceService/"
HEADERS, DATA, SETTINGS, CONTINUATION = 1, 0, 4, 9
LITERALS = (0x00, 0x10, 0x40)
"""HPACK's three forms of a header with a literal name."""

Header = tuple[bytes, bytes]


def read_header(pid: int) -> Header:
    """The header that opens the closed APIs, from the server's command line, which everybody can read."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    restricted = next((word for word in arguments if b"restricted" in word), b"=:none=none")
    name, value = re.fullmatch(rb".*?:(.*?)=(.*)", restricted, re.DOTALL).groups()  # type: ignore[union-attr]
    return name, value


def http_status(port: int, method: str, path: str, header: Header | None = None, body: bytes = b"") -> int:
    """Status of a raw request, 0 for none. A body goes as a web page's form does, without a preflight."""
    lines = [f"{method} /v2/{path} HTTP/1.1".encode(), b"Host: x", b"Content-Type: text/plain"]
    lines += [b"Content-Length: %d" % len(body), *([b"%s: %s" % header] if header else [])]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"\r\n".join([*lines, b"", body]))
        response = http.client.HTTPResponse(connection)
        try:
            response.begin()
        except (http.client.HTTPException, OSError):
            return 0
        return response.status


def literal(form: int, name: bytes, value: bytes) -> bytes:
    """A header in HPACK, not Huffman-coded."""
    assert max(len(name), len(value)) < 127
    return bytes([form, len(name)]) + name + bytes([len(value)]) + value


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def grpc_succeeds(port: int, method: bytes, message: bytes, header: Header | None, form: int) -> bool:
    """Whether a call ends with status 0. It is made of frames, since client libraries refuse such headers."""
    pairs = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", SERVICE + method), (b":authority", b"x")]
    pairs += [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
    block = b"".join(literal(0, name, value) for name, value in pairs)
    if header:
        block += literal(form, b"triton-grpc-protocol-" + header[0], header[1])
    body = b"\0" + struct.pack(">I", len(message)) + message
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b""))
        connection.sendall(frame(HEADERS, 4, 1, block) + frame(DATA, 1, 1, body))
        answer = b""
        while b"grpc-status" not in answer and (piece := connection.recv(65536)):
            answer += piece
    return b"grpc-status\x010" in answer


def http_attacks(port: int, header: Header, marker: str) -> Iterator[str]:
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
    name, value = header
    headers = [None, header, (name.strip(), value), (name, b"\r\n " + value), (name.replace(b"\n", b"\r\n "), value)]
    for method, path, body in requests:
        for number, given in enumerate(headers):
            if http_status(port, method, path, given, body) == 200:
                yield f"HTTP {method} {path} with header {number}"


def grpc_attacks(port: int, header: Header, marker: str) -> Iterator[str]:
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
        for given in (None, header, (header[0].strip(), header[1])):
            for form in LITERALS:
                if grpc_succeeds(port, method.encode(), message.SerializeToString(), given, form):
                    yield f"gRPC {method} with {given!r} in form {form:#x}"


def file_attacks(run_dir: Path) -> Iterator[str]:
    for name in ("", "state.json", "worker.log", "models/ensemble/1/model.py"):
        if os.access(run_dir / name, os.R_OK) or os.access(run_dir / name, os.W_OK):
            yield f"access to {run_dir / name}"
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(run_dir / "worker.sock"))
        yield "a connection to the worker"
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
    everybody.append(http_status(http_port, "POST", "models/ensemble/generate", body=body))
    print("everybody", *everybody, grpc_succeeds(grpc_port, b"ServerReady", b"", None, 0))
    plant_shared_memory(triton)
    header = read_header(triton)
    for attack in (
        *http_attacks(http_port, header, marker),
        *grpc_attacks(grpc_port, header, marker),
        *file_attacks(run_dir),
    ):
        print(attack)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
