"""Who reaches the front end: no web page, nobody without the key; and what its log says of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import psutil
import pytest
from opentelemetry.trace import NoOpTracerProvider
from starlette.datastructures import Headers

from redraft.openai import access
from redraft.openai.access import Access, Gate
from redraft.openai.app import create_app
from redraft.openai.metrics import FrontEndMetrics
from redraft.openai.model import ServedModel
from redraft.openai.service import Service
from redraft.openai.tracing import Tracing
from redraft.request import GenerateRequest, SequenceStats
from redraft.worker.protocol import Chunk, WorkerStatus
from tests.openai.serving import KEYS, MODEL
from tests.serving.client_side import HTTP

HELLO = {"messages": [{"role": "user", "content": "a secret recipe"}], "max_tokens": 3}
CHAT = "/v1/chat/completions"
KEY, OTHER_KEY = KEYS
NOT_TRACED = Tracing(NoOpTracerProvider(), MODEL)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:{port}"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "192.168.1.5"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "localhost:{port}"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "127.0.0.1:{port}"}, 200),
        ({"Host": "[::1]:{port}"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[::1"}, 403),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
    ],
)
def test_a_web_page_does_not_reach_it(server, headers, status):
    """A page sends its own Origin; where DNS was turned to 127.0.0.1, the Host of its own site."""
    named = {name: value.format(port=server.port) for name, value in headers.items()}
    for answer in (server.post(CHAT, HELLO, named), HTTP.get(f"{server.url}/v1/models", headers=named)):
        assert answer.status_code == status, answer.text
        assert not [name for name in answer.headers if name.startswith("access-control-")]
        if status == 403:
            assert answer.json()["error"]["code"] in ("host_not_allowed", "origin_not_allowed")


def test_no_preflight_succeeds(server):
    headers = {"Origin": server.url, "Access-Control-Request-Method": "POST"}
    answer = HTTP.options(f"{server.url}{CHAT}", headers=headers)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers


def test_keys_and_a_name(locked_server):
    server = locked_server
    assert server.client().chat.completions.create(model="my-name", **HELLO).model == "my-name"
    with pytest.raises(openai.AuthenticationError) as refused:
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    wrong = (None, "", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer \xe9")
    for header in (*wrong, f"Bearer {server.key}"):
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        assert HTTP.get(f"{server.url}/v1/models", headers=headers).status_code == 401, header
    for key in KEYS:
        good = {"Authorization": f"bearer {key}", "Host": "my.example", "Origin": "https://my.example"}
        assert HTTP.get(f"{server.url}/v1/models", headers=good).status_code == 200
    assert server.health() == 200, "probes have no key"
    assert KEY not in " ".join(psutil.Process(server.process.pid).cmdline())
    assert KEY not in server.log


@pytest.mark.parametrize("keys", [set(), {KEY}, {KEY, OTHER_KEY}])
def test_whose_requests_count_together(bundle, keys):
    """Those of an address or, where there are several keys, of a key. More at once than a client may have never fit."""
    names = []

    def submit(wanted: GenerateRequest, on_message: Callable[[Chunk], None]) -> None:
        names.append(wanted.client)
        on_message(Chunk(id=wanted.id, done=True, finish_reason="length", stats=SequenceStats()))

    client = SimpleNamespace(new_id=lambda: "r1", submit=submit)
    service = Service(ServedModel(bundle), client, FrontEndMetrics(Path("none")), 1.0, NOT_TRACED)
    service.status = WorkerStatus(limits={"slots": 2, "max_queue": 2, "max_per_client": 3})
    gate = Gate(create_app(service), Access(keys=frozenset(keys)), service.metrics)

    async def ask(key: str, address: str, n: int = 1) -> httpx.Response:
        transport = httpx.ASGITransport(gate, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as asking:
            headers = {"Authorization": f"Bearer {key}"}
            return await asking.post("/v1/completions", json={"prompt": "a", "n": n}, headers=headers)

    for key, address in ((KEY, "10.0.0.1"), (KEY, "10.0.0.2"), (OTHER_KEY if len(keys) > 1 else KEY, "10.0.0.1")):
        assert asyncio.run(ask(key, address)).status_code == 200
    assert len(set(names)) == 2
    if len(keys) > 1:
        assert names[0] == names[1] != names[2]
        assert KEY not in str(names)
    else:
        assert names == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    refused = asyncio.run(ask(KEY, "10.0.0.1", n=4))
    assert refused.status_code == 400
    assert "n: expected at most 3 choices in all, as --max-per-client allows, got 4" in refused.text


def test_a_failure_is_an_answer_in_openais_form(monkeypatch):
    failures: list[Exception] = []
    monkeypatch.setattr(access, "log_failure", failures.append)

    async def fail() -> bool:
        raise RuntimeError

    gate = Gate(
        create_app(SimpleNamespace(worker_ready=fail, tracing=NOT_TRACED)), Access(), FrontEndMetrics(Path("none"))
    )

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://localhost") as client:
            return await client.get("/health")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers["x-request-id"]
    assert [type(one) for one in failures] == [RuntimeError]


def test_requests_are_told_apart_and_prompts_are_not_logged(server):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    answer = server.post(CHAT, HELLO, {"X-Request-Id": "mine-1", "traceparent": trace})
    assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("mine-1", trace)
    other = server.post(CHAT, HELLO, {"X-Request-Id": "two words", "traceparent": "junk"})
    assert len(other.headers["x-request-id"]) == 32
    assert "traceparent" not in other.headers
    server.post(CHAT, HELLO | {"temperature": "a secret value"})
    assert f"POST {CHAT} 200 " in server.log
    assert f"mine-1 {trace}" in server.log
    assert "secret" not in server.log
    refused = server.client().chat.completions.with_raw_response.create(model=MODEL, **HELLO)
    assert refused.headers["x-request-id"]


def test_texts_are_told_apart_by_key_and_a_digest_does_not_show_it():
    def scope(keys, key):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return Access(keys=frozenset(keys)).scope(Headers(headers))

    scopes = [scope(KEYS, key) for key in KEYS]
    assert len({*scopes}) == len(KEYS)
    one = scopes[0]
    assert KEY not in one
    assert scope([KEY], KEY) == one
    assert scope([], KEY) is scope([], None) is scope(KEYS, None) is None
