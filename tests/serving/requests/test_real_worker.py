"""The real worker behind Triton, on the toy engine (2 slots, 2 waiting)."""

from __future__ import annotations

import contextlib
import sys
import threading

import httpx
import pytest
from tritonclient.utils import InferenceServerException

from redraft.request import GenerateRequest, SamplingConfig
from redraft.serving import launcher
from redraft.serving.processes import owned_processes
from redraft.worker.client import WorkerClient
from tests.conftest import wait_until
from tests.serving.client_side import GrpcStream, Service, start

TOY_WORKER = [sys.executable, "-m", "tests.serving.requests.toy_engine_worker"]
SEEDED = {"temperature": 0.8, "top_p": 0.9, "random_seed": 2**63 + 5, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def service(run_folder, fake_bundle):
    return start(run_folder, fake_bundle, worker_command=TOY_WORKER, max_queue=2)


def directly(service: Service, prompt: str, max_tokens: int, sampling: SamplingConfig) -> str:
    with WorkerClient(service.run_dir.socket) as client:
        assert client.wait_connected(60)
        request = GenerateRequest(id=client.new_id(), text=prompt, max_tokens=max_tokens, sampling=sampling)
        return client.complete(request).text


@pytest.mark.parametrize("options", [{}, SEEDED])
def test_triton_changes_nothing(service, stream, options):
    names = {"random_seed": "seed"}
    sampling = SamplingConfig(**{names.get(name, name): value for name, value in options.items()})
    expected = directly(service, "What is ä?", 24, sampling)
    body = {"text_input": "What is ä?", "max_tokens": 24, **options}
    assert service.generate(body)["text_output"] == expected
    events = service.generate_stream(body | {"stream": True})
    assert "".join(event["text_output"] for event in events) == expected
    assert len(events) > 1


def test_a_full_queue_says_so_at_once(service):
    streams = [GrpcStream(service.grpc) for _ in range(4)]
    for stream in streams:
        stream.send(text_input="fill", max_tokens=240, stream=True, end_id=-1, drafting_method="auto_regressive")
    wait_until(lambda: service.metrics()["redraft_num_requests_waiting"] == 2)
    error = service.generate({"text_input": "one more", "max_tokens": 4})["error"]
    assert "wait" in error
    assert service.metrics()["redraft_num_requests_waiting"] == 2, "answered before those who wait"
    for stream in streams:
        stream.close(cancel=True)
    wait_until(lambda: service.metrics()["redraft_num_requests_running"] == 0)
    assert "text_output" in service.generate({"text_input": "free again", "max_tokens": 4})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text_input": "x", "max_tokens": 99999}, "max_tokens: expected at most 25"),
        ({"text_input": "x" * 300, "max_tokens": 4}, "prompt has|context"),
    ],
)
def test_limits_of_the_bundle(service, body, message):
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(service.generate(body)["error"])


@pytest.mark.slow
@pytest.mark.parametrize("stops", [1, 2])
def test_stop_lets_running_requests_end(run_folder, fake_bundle, stops):
    """Slow, as it starts a service. It would catch a stop that fails running requests, or a second one that waits for
    them; the worker's tests have the limit of that time."""
    folder = run_folder / f"drained-{stops}"
    service = start(folder, fake_bundle, worker_command=TOY_WORKER, drain_s=60.0)
    stream = GrpcStream(service.grpc)
    stream.send(text_input="long", max_tokens=240, stream=True, end_id=-1, drafting_method="auto_regressive")
    stream.receive()
    stopping = threading.Thread(target=launcher.stop, args=(folder,))
    stopping.start()
    wait_until(lambda: service.state.phase in ("stopping", "stopped"))
    if stops == 2:
        launcher.stop(folder)
        with pytest.raises(InferenceServerException, match="shutting down"):
            stream.receive_all()
    else:
        new = {"text_input": "new", "max_tokens": 1}
        wait_until(lambda: "shutting down" in service.generate(new).get("error", ""))
        assert len(stream.receive_all()) > 1
        said = set()
        with contextlib.suppress(httpx.NetworkError, httpx.RemoteProtocolError):  # the guard has ended too
            while True:
                said.add(service.generate(new)["error"])
        assert not [text for text in said if "restarting" in text], said
    stopping.join(60)
    assert owned_processes(folder) == []
    assert not service.run_dir.stopping.exists()
    stream.close()
