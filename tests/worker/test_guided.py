"""Guided requests through a worker: compiled beside the steps, refused without harm."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from redraft.grammar import trial
from redraft.request import GenerateRequest, Guide, InvalidRequest
from redraft.worker import server
from redraft.worker.client import WorkerClient, WorkerError
from redraft.worker.server import Worker
from tests.conftest import slowness, wait_until, waits_at_most
from tests.worker.toy_worker import toy_runtime

CHOICE = Guide(kind="choice", text='["yes", "no"]')
COMPLEX = Guide(
    kind="json_schema", text=r'{"type": "string", "pattern": "^(?:\\S+\\s+){0,199}\\S+$", "maxLength": 2000}'
)
Y = Guide(kind="choice", text='["y"]')
HOSTILE = {
    "a long chain of rules": Guide(
        kind="grammar", text="\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(9000)), 'r9000 ::= "a"'])
    ),
    "deep nesting": Guide(kind="json_schema", text='{"items":' * 20_000 + "{}" + "}" * 20_000),
}


@pytest.fixture
def service(tmp_path: Path):
    """A worker in a thread, 5 ms per step, a client, and the runtime."""
    runtime = toy_runtime(0.005)
    served = Worker(runtime, tmp_path / "w.sock")
    thread = threading.Thread(target=served.run)
    thread.start()
    with WorkerClient(tmp_path / "w.sock") as client:
        assert client.wait_connected(60)
        yield client, runtime
    served.stop()
    thread.join()


def request(client: WorkerClient, guide: Guide | None, sender: str | None = None, **fields) -> GenerateRequest:
    return GenerateRequest(
        **{"id": client.new_id(), "client": sender, "text": "hello", "max_tokens": 20, "guide": guide, **fields},
    )


def test_an_answer_is_what_its_guide_asks_for(service):
    client, runtime = service
    for _ in range(2):
        whole = client.complete(request(client, CHOICE), timeout=600)
        assert (whole.text in CHOICE.choices, whole.finish_reason) == (True, "stop")
    assert runtime.grammars.cached(CHOICE) is not None
    chunks = list(client.generate(request(client, CHOICE, stream=True), timeout=600))
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_a_guide_that_is_too_complex_to_follow_is_an_error(service):
    """Not an answer that ends. It compiles, and shows while the answer is written."""
    client, _ = service
    problem = r"^guide\.text: the json_schema is too complex to go on with after 4 tokens of the answer: expected a "
    for stream in (False, True):
        with pytest.raises(WorkerError, match=problem):
            list(client.generate(request(client, COMPLEX, stream=stream), timeout=600))
    assert client.complete(request(client, COMPLEX, max_tokens=1), timeout=600).finish_reason == "length"
    assert client.complete(request(client, CHOICE), timeout=600).finish_reason == "stop"
    assert 'request_success_total{finished_reason="error"} 2.0' in client.status(60, metrics=True).metrics
    assert client.status(60).running == 0


def test_what_waits_for_a_guide_refuses_no_text(service, monkeypatch):
    """And a guide that is kept is not looked up again."""
    client, runtime = service
    client.complete(request(client, CHOICE), timeout=600)
    free, compiled, compile_guide, ended = threading.Event(), [], runtime.grammars.compile, threading.Event()

    def slowly(guide: Guide, seconds: float | None):
        compiled.append(guide)
        free.wait(60)
        return compile_guide(guide, seconds)

    monkeypatch.setattr(runtime.grammars, "compile", slowly)
    monkeypatch.setattr(server, "INLINE_CHARACTERS", 3)
    other = Guide(kind="choice", text='["no"]')
    for number in range(runtime.limits.max_queue):
        client.submit(request(client, other), lambda message, last=number: last or ended.set())
    for guide in (CHOICE, None):
        assert client.complete(request(client, guide, max_tokens=3), timeout=600).finish_reason in ("stop", "length")
    with pytest.raises(WorkerError, match="overloaded"):
        client.complete(request(client, other), timeout=600)
    assert compiled == [other]
    free.set()
    assert ended.wait(60)


def slow_guide(number: int) -> Guide:
    """A guide that takes longer to compile than any may, and is unlike those of other numbers."""
    return Guide(kind="json_schema", text=f'{{"type": "integer", "multipleOf": {123456789 + 2 * number}}}')


def test_clients_whose_guides_do_not_compile_delay_no_other(service, monkeypatch):
    """Eight of them keep the compiler busy: each sends the next when one is refused."""
    client, runtime = service
    monkeypatch.setattr(runtime, "limits", replace(runtime.limits, max_queue=32))
    client.complete(request(client, CHOICE, sender="other"), timeout=600)
    monkeypatch.setattr(trial, "COMPILE_S", 0.2)
    refused, sent, answered = list[str](), list[str](), threading.Event()

    def send(sender: str) -> None:
        sent.append(sender)
        client.submit(request(client, slow_guide(len(sent)), sender=sender), partial(note, sender))

    def note(sender: str, message) -> None:
        refused.append(message.message)
        if not answered.is_set():
            send(sender)

    for number in range(8):
        send(f"sender {number}")
    with waits_at_most(10):
        for number in range(5):
            guide = Guide(kind="regex", text=f"a{number}b{{2}}")
            client.complete(request(client, guide, sender="other"), timeout=600)
    answered.set()
    wait_until(lambda: len(refused) == len(sent))
    assert all("it takes more than 0.2 s to compile" in text for text in refused)


def test_a_client_that_fills_the_queue_makes_room_for_another(service, monkeypatch):
    client, runtime = service
    monkeypatch.setattr(runtime, "limits", replace(runtime.limits, max_queue=4))
    free, compile_guide = threading.Event(), runtime.grammars.compile
    slowly = lambda guide, seconds: free.wait(60) and compile_guide(guide, seconds)  # noqa: E731
    monkeypatch.setattr(runtime.grammars, "compile", slowly)
    messages = list[object]()
    for number in range(runtime.limits.max_queue):
        guide = Guide(kind="choice", text=f'["a{number}"]')
        client.submit(request(client, guide, sender="one", max_tokens=1), messages.append)
    with pytest.raises(WorkerError, match="overloaded"):
        client.complete(request(client, CHOICE, sender="one"), timeout=600)
    answers = list[object]()
    client.submit(request(client, CHOICE, sender="other"), answers.append)
    wait_until(lambda: messages)
    assert "overloaded" in messages[0].message
    free.set()
    wait_until(lambda: answers)
    assert answers[0].text in CHOICE.choices
    wait_until(lambda: len(messages) == runtime.limits.max_queue)


def test_a_guide_whose_first_token_would_end_the_text_is_refused():
    runtime = toy_runtime()
    end = runtime.codec.encode("y")[0]
    with pytest.raises(InvalidRequest, match=r"^guide\.text: only end tokens could begin"):
        runtime.sequence("a", GenerateRequest(id="a", text="b", max_tokens=3, guide=Y, end_id=end))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_guide_that_is_refused_stops_no_stream(service, monkeypatch, name):
    """One good try of three will do: the machine itself may stand still for a moment."""
    client, _ = service

    def seconds_and_gap(number: int) -> tuple[float, float]:
        """How long the refusal takes, and a neighbour's longest wait for a token, of a usual machine's seconds."""
        pace = slowness(time.monotonic)
        client.complete(request(client, Guide(kind="choice", text=f'["{number}"]')), timeout=600)  # all has started
        gaps, running = [0.0], threading.Event()

        def stream() -> None:
            last = time.perf_counter()
            for _ in client.generate(request(client, None, stream=True, end_id=-1, max_tokens=200), timeout=600):
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
                running.set()

        neighbour = threading.Thread(target=stream)
        neighbour.start()
        assert running.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(trial, "COMPILE_S", 0.3)
            started = time.perf_counter()
            with pytest.raises(WorkerError, match=r"^guide.text: the \w+ cannot be used: ") as refusal:
                client.complete(request(client, HOSTILE[name]), timeout=600)
            seconds = time.perf_counter() - started
        assert refusal.value.code == "invalid_request"
        neighbour.join()
        pace = max(pace, slowness(time.monotonic))
        return seconds / pace, max(gaps) / pace

    assert any(seconds < 5 and gap < 0.5 for seconds, gap in map(seconds_and_gap, range(3)))
    assert client.complete(request(client, CHOICE), timeout=600).text in CHOICE.choices
