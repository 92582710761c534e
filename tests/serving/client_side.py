"""A running service and its clients, for the serving layer's tests."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

from redraft.serving import launcher
from redraft.serving.rundir import RunDir, State
from redraft.serving.settings import ServeSettings

HTTP = httpx.Client(timeout=120, limits=httpx.Limits(max_keepalive_connections=0))
"""A new connection for each request, as tests restart what they ask. `httpx.get` and its like make a TLS context too:
50 ms of a processor, which loops that wait for a service spent twenty times a second."""
MANY_CHUNKS = b"1\r\n \r\n" * 10_000
SLOW_S = 20
"""What the fake worker takes for 400 tokens after "slow"."""
FAKE_WORKER = [sys.executable, str(Path(__file__).parent / "fake_worker.py")]
DTYPES = {
    **{"int": np.int32, "float": np.float32, "bool": np.bool_, "uint64": np.uint64},
    **{"str": np.object_, "bytes": np.object_},
}
EVERY_FIELD = {
    **{"text_input": "hi", "max_tokens": 4, "beam_width": 1, "num_return_sequences": 1, "temperature": 1.0},
    **{"top_k": 1, "top_p": 0.9, "length_penalty": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0},
    **{"frequency_penalty": 0.0, "min_length": 1, "random_seed": np.uint64(2**64 - 1), "end_id": 2, "pad_id": 2},
    **{"min_p": 0.01, "stop_token_ids": [3, 4]},
    **{"bad_words": [""], "stop_words": ["x", "y"], "exclude_input_in_output": True, "return_log_probs": True},
}
"""The fields of `ensemble` but `stream`, as the clients of the TensorRT-LLM backend send them."""

_given_ports: set[int] = set()


@dataclass
class Service:
    """A running service as a client sees it."""

    settings: ServeSettings
    run_dir: RunDir

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.settings.grpc_port}"

    @property
    def state(self) -> State:
        state = self.run_dir.read_state()
        assert state is not None
        return state

    def ready(self) -> bool:
        try:
            return HTTP.get(f"{self.url}/v2/health/ready", timeout=60).status_code == 200
        except httpx.ConnectError as error:
            error.add_note(self.run_dir.supervisor_log.read_text()[-3000:])
            raise

    def metrics(self) -> dict[str, float]:
        text = HTTP.get(f"http://127.0.0.1:{self.settings.metrics_port}/metrics", timeout=60).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("redraft_")]
        return {name: float(value) for name, value in lines}

    def generate(self, body: dict[str, Any] | str | bytes, model: str = "ensemble") -> dict[str, Any]:
        content = json.dumps(body) if isinstance(body, dict) else body
        return HTTP.post(f"{self.url}/v2/models/{model}/generate", content=content, timeout=120).json()

    def generate_stream(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        url = f"{self.url}/v2/models/ensemble/generate_stream"
        with HTTP.stream("POST", url, json=body, timeout=120) as response:
            return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]


def start(folder: Path, bundle: Path, **changes: Any) -> Service:
    """Start a service on free ports, without the front end `/v1`; the caller stops it."""
    http, grpc, metrics = free_ports(3)
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "openai_port": 0}
    settings = ServeSettings(bundle=bundle, **(ports | changes))
    launcher.serve(settings, folder, lambda activity: None)
    return Service(settings, RunDir(folder))


@contextlib.contextmanager
def told(service: Service, name: str) -> Iterator[None]:
    """The bundle has a file of this name meanwhile, by which a test tells the fake worker what to do."""
    file = service.settings.bundle / name
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody holds now, that no test of this process has been given, and that the kernel gives
    to no connection meanwhile. The first five processes of a run have a range each; a sixth, or another run, may take
    the same."""
    first = 15_000 + 3_000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 5)
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = SystemRandom().randrange(first, first + 3_000)
            probe.bind(("127.0.0.1", port))
            if port not in _given_ports:
                _given_ports.add(port)
                found.append(port)
    return found


def grpc_inputs(**fields: Any) -> list[grpcclient.InferInput]:
    """Inputs of shape [1, n] as clients of the TensorRT-LLM backend make them; arrays are sent as they are."""
    inputs = []
    for name, value in fields.items():
        array = value if isinstance(value, np.ndarray) else _array(value if isinstance(value, list) else [value])
        inputs.append(grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def _array(values: list[Any]) -> np.ndarray:
    return np.array([values], DTYPES[type(values[0]).__name__])


class GrpcStream:
    """One bidirectional stream, as the load generators use it."""

    def __init__(self, url: str, headers: dict[str, str] | None = None):
        self._client = grpcclient.InferenceServerClient(url)
        self._events: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._events.put((result, error)), headers=headers)

    def send(self, model: str = "ensemble", request_id: str = "", outputs: Any = None, **fields: Any) -> None:
        self._client.async_stream_infer(
            model, grpc_inputs(**fields), outputs=outputs, request_id=request_id, enable_empty_final_response=True
        )

    def receive(self, timeout: float = 60.0) -> Any:
        """Next result. Raises the client library's exception for an error response."""
        result, error = self._events.get(timeout=timeout)
        if error is not None:
            raise error
        return result

    def receive_all(self) -> list[Any]:
        """Results of the only request in flight, to its final response."""
        results = [self.receive()]
        while not results[-1].get_response().parameters["triton_final_response"].bool_param:
            results.append(self.receive())
        return results

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


@contextlib.contextmanager
def chunk_senders(port: int, *heads: bytes) -> Iterator[list[bytes]]:
    """A client for each request header that sends bodies in chunks of a byte without end, on a new connection where one
    is closed. Yields the headers of the pieces that were sent."""
    over, sent = threading.Event(), []

    def send(head: bytes) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
                while not over.is_set():
                    connection.sendall(MANY_CHUNKS)
                    sent.append(head)

    threads = [threading.Thread(target=send, args=(head,)) for head in heads]
    for thread in threads:
        thread.start()
    try:
        yield sent
    finally:
        over.set()
        for thread in threads:
            thread.join()
