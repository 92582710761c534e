"""A Triton server that requests end, or that hangs: it is back soon, also the next time.

Slow, as each fault restarts Triton. It would catch a server that is never restarted, or is restarted for ever.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
from collections.abc import Callable

import httpx
import psutil
import pytest
import tritonclient.grpc as grpcclient

from redraft.serving.processes import is_alive
from redraft.serving.tritonserver import models_live
from tests.conftest import wait_until
from tests.serving.client_side import FAKE_WORKER, Service, grpc_inputs, start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(run_folder, fake_bundle):
    return start(run_folder, fake_bundle, worker_command=FAKE_WORKER, silence_s=60.0, triton_silence_s=4.0)


def class_count(service: Service) -> None:
    """Ends Triton 24.10 with SIGFPE."""
    output = grpcclient.InferRequestedOutput("text_output", class_count=1)
    with grpcclient.InferenceServerClient(service.grpc) as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("ensemble", grpc_inputs(text_input="hi", max_tokens=1), outputs=[output])


def brackets(service: Service) -> None:
    """Ends Triton 24.10 with SIGSEGV."""
    httpx.post(f"{service.url}/v2/models/ensemble/generate", content="[" * 1_000_000, timeout=60)


def chunks(service: Service) -> None:
    """Ends Triton 24.10 with SIGSEGV: CVE-2025-23310."""
    with socket.create_connection(("127.0.0.1", service.settings.http_port), timeout=60) as connection:
        connection.sendall(
            b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        connection.sendall(b"1\r\n[\r\n" * 600_000 + b"0\r\n\r\n")
        connection.recv(1)


def form(service: Service) -> None:
    """Ends Triton 24.10 with SIGSEGV: the content type that curl -d sends."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    httpx.post(f"{service.url}/v2/health/live", content="a" * 5_000_000, headers=headers, timeout=60)


def answers(service: Service, model: str = "ensemble") -> bool:
    body = {"text_input": "hi", "max_tokens": 1} if model == "ensemble" else {"input_ids": [0], "request_output_len": 1}
    with contextlib.suppress(httpx.HTTPError):
        return httpx.post(f"{service.url}/v2/models/{model}/generate", json=body, timeout=5).status_code == 200
    return False


def assert_it_comes_back(service: Service, after: Callable[[], None]) -> None:
    restarts = service.state.triton_restarts
    after()
    wait_until(lambda: service.state.triton_restarts > restarts and service.state.phase == "ready")
    wait_until(lambda: answers(service) and answers(service, "tensorrt_llm"))
    assert service.ready()


def test_requests_that_end_the_server_do_not_delay_its_next_start(service):
    for request in (class_count, brackets, chunks, form):

        def send(request=request) -> None:
            with contextlib.suppress(httpx.HTTPError, OSError):
                request(service)

        assert_it_comes_back(service, send)
    log = service.run_dir.supervisor_log.read_text()
    assert len(re.findall(r"Triton server was killed by signal (?:8|11)", log)) == 4
    delays = [float(delay) for delay in re.findall(r"It starts again in (\S+) s", log)]
    assert max(delays) <= 0.5


@pytest.mark.parametrize("victim", ["server", "tensorrt_llm"])
def test_a_hung_server_or_model_is_restarted(service, victim):
    server = psutil.Process(service.state.triton_pid)
    stubs = {child.cmdline()[1].split("/")[-3]: child for child in server.children()}
    process = stubs.get(victim, server)
    assert_it_comes_back(service, lambda: process.send_signal(signal.SIGSTOP))
    assert not is_alive(process)
    assert "did not answer for" in service.run_dir.supervisor_log.read_text()


def test_a_hung_worker_does_not_delay_the_servers_next_start(service):
    worker = psutil.Process(service.state.worker_pid)
    worker.suspend()
    try:
        wait_until(lambda: not answers(service))
        restarts = service.state.triton_restarts
        psutil.Process(service.state.triton_pid).kill()
        wait_until(lambda: service.state.triton_restarts > restarts, timeout=20)
        wait_until(lambda: models_live(service.settings.http_port, 5), timeout=30)
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
