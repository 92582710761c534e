"""Requests that would end the Triton server, and a server or guard that ends or hangs: it is back soon, also the next
time.

Slow, as each fault restarts Triton. It would catch a request that gets past the guard, and a server that is never
restarted, or is restarted for ever.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Callable

import httpx
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from redraft.serving.processes import is_alive
from redraft.serving.tritonserver import models_live
from tests.conftest import wait_until
from tests.serving.client_side import FAKE_WORKER, HTTP, GrpcStream, Service, start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(run_folder, fake_bundle):
    return start(run_folder, fake_bundle, worker_command=FAKE_WORKER, silence_s=60.0, triton_silence_s=4.0)


def class_count(service: Service) -> str:
    """Ends Triton 24.10 with SIGFPE."""
    output = grpcclient.InferRequestedOutput("text_output", class_count=1)
    stream = GrpcStream(service.grpc)
    stream.send(text_input="hi", max_tokens=1, outputs=[output])
    with pytest.raises(InferenceServerException) as refused:
        stream.receive()
    stream.close()
    return str(refused.value)


def brackets(service: Service) -> str:
    """Ends Triton 24.10 with SIGSEGV."""
    return HTTP.post(f"{service.url}/v2/models/ensemble/generate", content="[" * 1_000_000, timeout=60).text


def chunks(service: Service) -> str:
    """Ends Triton 24.10 with SIGSEGV: CVE-2025-23310."""
    with socket.create_connection(("127.0.0.1", service.settings.http_port), timeout=60) as connection:
        connection.sendall(
            b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        connection.sendall(b"1\r\n[\r\n" * 600_000 + b"0\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(4096), b"")).decode()


def form(service: Service) -> str:
    """Ends Triton 24.10 with SIGSEGV, whatever the path: the content type that curl -d sends."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    url = f"{service.url}/v2/models/ensemble/generate"
    return HTTP.post(url, content="a" * 5_000_000, headers=headers, timeout=60).text


def form_for_metrics(service: Service) -> str:
    """The same, for the server of Triton's metrics."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    url = f"http://127.0.0.1:{service.settings.metrics_port}/metrics"
    return HTTP.post(url, content="a" * 5_000_000, headers=headers, timeout=60).text


def answers(service: Service, model: str = "ensemble", text: str = "hi", timeout: float = 30.0) -> bool:
    body = {"text_input": text, "max_tokens": 1} if model == "ensemble" else {"input_ids": [0], "request_output_len": 1}
    with contextlib.suppress(httpx.HTTPError):
        return HTTP.post(f"{service.url}/v2/models/{model}/generate", json=body, timeout=timeout).status_code == 200
    return False


def assert_it_comes_back(service: Service, after: Callable[[], None]) -> None:
    restarts = service.state.triton_restarts
    after()
    wait_until(lambda: service.state.triton_restarts > restarts and service.state.phase == "ready")
    wait_until(lambda: answers(service) and answers(service, "tensorrt_llm"))
    assert service.ready()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (class_count, "'text_output': the parameter 'classification' is not served"),
        (brackets, "not valid JSON: recursion limit exceeded"),
        (chunks, "too many chunks: expected at most"),
        (form, "the body is too large"),
        (form_for_metrics, "POST is not for this path: expected GET"),
    ],
)
def test_requests_that_would_end_the_server_are_refused(service, request_, message):
    restarts = service.state.triton_restarts
    assert message in request_(service)
    assert answers(service)
    assert service.state.triton_restarts == restarts
    assert is_alive(psutil.Process(service.state.triton_pid))


def test_a_server_that_ends_again_and_again_is_back_as_soon_each_time(service):
    for _ in range(3):
        assert_it_comes_back(service, lambda: os.kill(service.state.triton_pid, signal.SIGSEGV))
    delays = [float(d) for d in re.findall(r"It starts again in (\S+) s", service.run_dir.supervisor_log.read_text())]
    assert max(delays) <= 0.5


def test_a_guard_that_ends_or_is_stopped_comes_back(service):
    for number, kill in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
        os.kill(service.state.guard_pid, kill)
        wait_until(lambda number=number: (service.state.guard_restarts, service.state.phase) == (number, "ready"))
        assert answers(service)


@pytest.mark.parametrize("victim", ["server", "postprocessing"])
def test_a_stopped_server_or_model_is_restarted(service, victim):
    server = psutil.Process(service.state.triton_pid)
    stubs = {child.cmdline()[1].split("/")[-3]: child for child in server.children()}
    process = stubs.get(victim, server)
    assert_it_comes_back(service, lambda: process.send_signal(signal.SIGSTOP))
    assert not is_alive(process)
    assert "was stopped by a signal" in service.run_dir.supervisor_log.read_text()


def test_a_hung_worker_does_not_delay_the_servers_next_start(service):
    worker = psutil.Process(service.state.worker_pid)
    assert not answers(service, text="hang", timeout=5.0)
    try:
        restarts = service.state.triton_restarts
        psutil.Process(service.state.triton_pid).kill()
        wait_until(lambda: service.state.triton_restarts > restarts, timeout=20)
        wait_until(lambda: models_live(service.run_dir.http_socket, 5), timeout=30)
        assert service.state.worker_pid == worker.pid
    finally:
        worker.resume()
    wait_until(lambda: service.state.phase == "ready" and answers(service))


def test_a_pause_of_the_supervisor_restarts_nothing(service):
    """Silence is what questions found, not what the clock says."""
    before, log = service.state, service.run_dir.supervisor_log.read_text()
    supervisor = psutil.Process(before.supervisor_pid)
    supervisor.suspend()
    assert not threading.Event().wait(service.settings.triton_silence_s + 3)
    supervisor.resume()
    assert not threading.Event().wait(2)
    assert service.run_dir.supervisor_log.read_text() == log
    assert service.state.triton_pid == before.triton_pid
