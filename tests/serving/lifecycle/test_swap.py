"""`redraft swap`: another bundle is served, and no request notices.

Slow, as it starts a service with Triton and `/v1` on the real worker with the toy engine. It would catch a request that
fails or is answered twice while workers change places, a failed load that takes the service down, and a front end that
goes on with the old bundle's name.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI

from redraft.serving import launcher
from redraft.serving.processes import ServingError, is_alive
from tests.cli.commands import run_command
from tests.conftest import wait_until
from tests.openai.serving import MODEL, toy_bundle
from tests.serving.client_side import GrpcStream, Service, free_ports, start
from tests.serving.lifecycle.starting import assert_nothing_is_left

pytestmark = pytest.mark.slow

TOY_WORKER = [sys.executable, "-m", "tests.serving.requests.toy_engine_worker"]
LONG = {"text_input": "hello", "max_tokens": 150, "end_id": -1, "drafting_method": "auto_regressive"}
"""Takes some 1.5 s."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Callable[[str], Path]:
    """A bundle of this name."""
    folder = tmp_path_factory.mktemp("bundles")

    def bundle(name: str) -> Path:
        path = toy_bundle(folder / name)
        config = json.loads((path / "config.json").read_text()) | {"name": name}
        (path / "config.json").write_text(json.dumps(config))
        return path

    return bundle


@pytest.fixture(scope="module")
def service(run_folder, bundles) -> Service:
    (port,) = free_ports(1)
    return start(run_folder, bundles(MODEL), worker_command=TOY_WORKER, openai_port=port)


@pytest.fixture(scope="module")
def openai(service) -> Iterator[OpenAI]:
    url = f"http://127.0.0.1:{service.settings.openai_port}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def swap(service: Service, bundle: Path | None) -> list[str]:
    said: list[str] = []
    launcher.swap(bundle, service.run_dir.path, said.append)
    return said


def test_requests_in_flight_end_and_new_ones_find_the_new_bundle(service, openai, bundles):
    """Streams and short requests of each front end, one after the other, while two swaps take place."""
    over, failures, counts = threading.Event(), [], dict.fromkeys(("http", "stream", "v1", "tokens"), 0)

    def v1() -> None:
        answer = openai.completions.create(model=MODEL, prompt="hello", max_tokens=5)
        assert answer.choices[0].finish_reason in ("length", "stop")

    def stream() -> None:
        events = service.generate_stream(LONG | {"stream": True})
        assert not any("error" in event for event in events), events[-1]

    def http() -> None:
        assert "text_output" in (answer := service.generate(LONG | {"max_tokens": 5})), answer

    def tokens() -> None:
        body = {"QUERY": "hello", "REQUEST_OUTPUT_LEN": 5}
        assert "INPUT_ID" in (answer := service.generate(body, "preprocessing")), answer

    def again_and_again(send: Callable[[], None]) -> None:
        while not over.is_set():
            try:
                send()
            except Exception as error:
                failures.append(error)
                return
            counts[send.__name__] += 1

    threads = [threading.Thread(target=again_and_again, args=(send,)) for send in (v1, stream, http, tokens)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: failures or min(counts.values()) > 0)
        for name in ("second", "third"):
            before, old = dict(counts), psutil.Process(service.state.worker_pid)
            said = swap(service, bundles(name))
            assert [text.partition(" ")[0] for text in said][:1] == ["loading"]
            assert not is_alive(old)
            assert service.state.settings.bundle.name == name
            assert service.state.phase == "ready"
            wait_until(lambda before=before: failures or all(counts[one] > before[one] + 1 for one in counts))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert [model.id for model in openai.models.list()] == ["third"]
    for accepted in ("third", "second", MODEL):
        answer = openai.chat.completions.create(
            model=accepted, messages=[{"role": "user", "content": "hello"}], max_tokens=2
        )
        assert answer.model == "third"
    state = service.state
    assert (state.worker_restarts, state.triton_restarts, state.openai_restarts, state.guard_restarts) == (0, 0, 0, 0)
    assert len(list(service.run_dir.path.glob("worker-*.sock"))) == 1


def test_going_back_serves_what_was_served_before(service, bundles):
    *_, first, second = service.state.before
    for bundle in (second, first):
        swap(service, None)
        assert service.state.settings.bundle == bundle
    assert "text_output" in service.generate(LONG | {"max_tokens": 2})
    with pytest.raises(ServingError, match="nothing was served before"):
        swap(service, None)


def test_a_bundle_that_does_not_load_leaves_the_old_one(service, bundles):
    broken = bundles("broken")
    (broken / "broken").touch()
    before = service.state
    done = run_command(["swap", "--bundle", str(broken), "--run-dir", str(service.run_dir.path)])
    assert done.exit_code == 1
    assert "the bundle is broken: build it again" in done.output
    assert "text_output" in service.generate(LONG | {"max_tokens": 2})
    after = service.state
    assert (after.worker_pid, after.settings.bundle, after.phase) == (
        before.worker_pid,
        before.settings.bundle,
        "ready",
    )
    assert after.swap.phase == "failed"
    assert (service.run_dir.path / "bundle").resolve() == before.settings.bundle


def test_what_is_refused_before_anything_starts(service, bundles, tmp_path, monkeypatch):
    other = bundles("other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    with pytest.raises(ServingError, match=r"has another tokenizer .* another --run-dir"):
        swap(service, other)
    with pytest.raises(ServingError, match="is not a bundle"):
        swap(service, tmp_path)
    with pytest.raises(ServingError, match=r"no service is running from .*`redraft serve`"):
        launcher.swap(bundles("second"), tmp_path / "none", print)
    monkeypatch.setattr(launcher, "host_bytes", lambda: 1_000_000)
    with pytest.raises(ServingError, match=r"would not fit into memory: .*MB, .* are free.*`redraft stop`"):
        swap(service, bundles("second"))


def test_a_worker_that_dies_after_a_swap_starts_again_with_the_new_bundle(service, openai, bundles):
    swap(service, bundles("fourth"))
    psutil.Process(service.state.worker_pid).kill()
    wait_until(lambda: service.state.phase == "degraded")
    wait_until(lambda: service.state.phase == "ready" and service.ready())
    assert "text_output" in service.generate(LONG | {"max_tokens": 2})
    psutil.Process(service.state.openai_pid).kill()
    wait_until(lambda: service.state.openai_restarts == 1 and service.state.phase == "ready")
    assert [model.id for model in openai.models.list()] == ["fourth"]


def test_a_stop_in_the_middle_leaves_nothing(service, bundles):
    """The old worker still has streams when the service is stopped, two of them in its queue; another swap is refused
    meanwhile."""
    streams = [GrpcStream(service.grpc) for _ in range(4)]
    for stream in streams:
        stream.send(**(LONG | {"max_tokens": 240}), stream=True)
    streams[0].receive()

    def is_cut_short() -> None:
        with pytest.raises(ServingError, match="the service has ended meanwhile"):
            swap(service, bundles("fifth"))

    swapping = threading.Thread(target=is_cut_short)
    swapping.start()
    wait_until(lambda: service.state.swap.phase == "draining")
    with pytest.raises(ServingError, match=r"another `redraft serve` or `redraft swap` is at work"):
        swap(service, bundles("sixth"))
    launcher.stop(service.run_dir.path)
    swapping.join(60)
    assert not swapping.is_alive()
    assert (service.state.phase, service.state.swap.phase) == ("stopped", "done")
    assert_nothing_is_left(service.run_dir.path)
    with pytest.raises(httpx.ConnectError):
        service.ready()
    for stream in streams:
        stream.close(cancel=True)
