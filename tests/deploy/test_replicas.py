"""Two real replicas behind the proxy of deploy/replicas: a chat stays at one, and no fault or upgrade of one costs a
client more than the streams that it was answering.

Slow, as replicas start. It would catch a proxy that spreads a chat over replicas, sends requests to one that is away or
drains, loses a client's key, or lets one client take another's share.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from redraft.serving import launcher
from redraft.serving.processes import owned_processes
from redraft.serving.settings import API_KEY_VARIABLE
from tests.conftest import OF_TESTS, ROOT, one_process, run_script, wait_until
from tests.serving.client_side import HTTP, GrpcStream, Service, free_ports, start

pytestmark = pytest.mark.slow

FILES = ROOT / "deploy/replicas"
SESSION = "x-session-id"
USERS, TURNS, TOKENS = 8, 5, 8
STORIES = count()
"""Makes each stream's prompt another: an answer that was served before would end before its replica is killed."""
NAME = "chat"
"""Of the model, whatever bundle a replica has: clients name it."""
KEY = "the-key-of-both"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


@dataclass
class Proxy:
    """Envoy as a client and its operator see it."""

    openai: int
    grpc: int
    admin: int

    def ask(self, body: Mapping[str, Any], address: str = "127.0.0.1", **headers: str) -> httpx.Response:
        """A chat's answer, asked for from a loopback address."""
        return ask(self.openai, body, address, **headers)

    def replicas(self, cluster: str = "openai") -> dict[int, tuple[bool, int]]:
        """By port, of /v1 or of Triton's `grpc`: whether a replica is in rotation, and the requests that it got."""
        status = HTTP.get(f"http://127.0.0.1:{self.admin}/clusters?format=json").json()
        found = {}
        for one in status["cluster_statuses"]:
            for host in one.get("host_statuses", ()) if one["name"] == cluster else ():
                health = host["health_status"]
                ready = health.get("eds_health_status") == "HEALTHY" and not health.get("failed_active_health_check")
                requests = next((stat.get("value", "0") for stat in host["stats"] if stat["name"] == "rq_total"), "0")
                found[host["address"]["socket_address"]["port_value"]] = ready, int(requests)
        return found

    def in_rotation(self, cluster: str = "openai") -> set[int]:
        return {port for port, (ready, _) in self.replicas(cluster).items() if ready}

    @contextmanager
    def reached(self, cluster: str = "openai") -> Iterator[list[int]]:
        """The ports of the replicas that requests reach meanwhile, known when they have ended."""
        before, ports = self.replicas(cluster), []
        yield ports
        ports += [port for port, (_, requests) in self.replicas(cluster).items() if requests > before[port][1]]

    def sessions(self, each: int) -> dict[int, list[str]]:
        """By port of /v1: names of sessions that the replica gets."""
        names: dict[int, list[str]] = {port: [] for port in self.replicas()}
        for number in range(100):
            name = f"session {number}"
            with self.reached() as reached:
                HTTP.get(f"http://127.0.0.1:{self.openai}/v1/models", headers={SESSION: name, **AUTHORIZED})
            (port,) = reached
            names[port].append(name)
            if min(map(len, names.values())) >= each:
                return {port: found[:each] for port, found in names.items()}
        raise AssertionError(f"one replica got nearly all: {names}")


def client_at(address: str) -> httpx.Client:
    """A client with a loopback address of its own."""
    return httpx.Client(transport=httpx.HTTPTransport(local_address=address, verify=False), timeout=120)


def ask(
    port: int, body: Mapping[str, Any], address: str = "127.0.0.1", path: str = "chat/completions", **headers: str
) -> httpx.Response:
    with client_at(address) as client:
        return client.post(f"http://127.0.0.1:{port}/v1/{path}", json=dict(body), headers=AUTHORIZED | headers)


def chat(*texts: str, tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    """A conversation whose turns alternate, for an answer of so many tokens."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": NAME, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}


def fill_in(listed: dict[str, Any], ports: Mapping[int, int]) -> dict[str, Any]:
    """A configuration with other ports."""
    text = json.dumps(listed)
    for old, new in ports.items():
        assert f'"port_value": {old}' in text
        text = text.replace(f'"port_value": {old}}}', f'"port_value": {new}}}')
    return json.loads(text)


@pytest.fixture(scope="module")
def replicas(smollm2_bundle: Path) -> Iterator[list[Service]]:
    """Two replicas of one thread each."""
    temporary = tempfile.TemporaryDirectory(prefix="redraft-test-")
    with pytest.MonkeyPatch.context() as patch, temporary as folder, ThreadPoolExecutor() as pool:
        patch.setenv(API_KEY_VARIABLE, KEY)
        ports = free_ports(2)
        options = {"threads": 1, "max_per_client": 4, "trusted_proxy": ["127.0.0.1"], "model_name": NAME}
        try:
            yield list(
                pool.map(
                    lambda port: start(Path(folder, str(port)), smollm2_bundle, openai_port=port, **options), ports
                )
            )
        finally:
            for port in ports:
                launcher.stop(Path(folder, str(port)))


@pytest.fixture(scope="module")
def proxy(replicas: list[Service], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder, proxy = tmp_path_factory.mktemp("envoy"), Proxy(*free_ports(3))
    ports = {9003: proxy.openai, 9001: proxy.grpc, 9901: proxy.admin}
    for base, replica in zip((8000, 8100), replicas, strict=True):
        ports |= {base + 3: replica.settings.openai_port, base + 1: replica.settings.grpc_port}
    listed = yaml.safe_load((FILES / "envoy.yaml").read_text())
    (folder / "envoy.yaml").write_text(json.dumps(fill_in(listed, ports)))
    shutil.copy(FILES / "conversation.lua", folder)
    envoy = [str(Path(sys.executable).with_name("envoy")), "--config-path", "envoy.yaml", "--use-dynamic-base-id"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*envoy, "--concurrency", "1"], cwd=folder, stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or ready(proxy), 60)
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        yield proxy
    finally:
        process.terminate()
        process.wait()


def ready(proxy: Proxy) -> bool:
    with suppress(httpx.TransportError):
        return all(len(proxy.in_rotation(cluster)) == 2 for cluster in ("openai", "grpc"))
    return False


@pytest.fixture(autouse=True)
def both_are_back(request: pytest.FixtureRequest, replicas: list[Service], proxy: Proxy) -> None:
    wait_until(lambda: ready(proxy), 60)


def cached_tokens(kind: str, post: Any) -> int:
    """What the cache saves of chats of several turns, of users side by side. `post(user, turn, body)` asks; `kind` is a
    letter that makes the chats new."""

    def talk(user: int) -> int:
        texts, cached = [f"{kind}{user}: tell me about the number {user} and what it is good for."], 0
        for turn in range(TURNS):
            answer = post(user, turn, chat(*texts)).json()
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            texts += [answer["choices"][0]["message"]["content"], f"Go on with part {turn}, please."]
        return cached

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(talk, range(USERS)))


def test_a_chat_stays_where_its_beginning_is_cached(proxy, replicas):
    """By its first message, and by a header; turn by turn at the other replica as the control."""
    ports = [replica.settings.openai_port for replica in replicas]
    alone = cached_tokens("a", lambda user, turn, body: ask(ports[0], body))
    by_message = cached_tokens("b", lambda user, turn, body: proxy.ask(body))
    by_header = cached_tokens("c", lambda user, turn, body: proxy.ask(body, **{SESSION: f"user {user}"}))
    spread = cached_tokens("d", lambda user, turn, body: ask(ports[(user + turn) % 2], body))
    assert by_message >= 0.98 * alone
    assert by_header >= 0.98 * alone
    assert spread < 0.8 * alone


TURNS_OF = {
    "completions": lambda text, rest: {"prompt": text + rest},
    "responses": lambda text, rest: {"input": text + rest},
    "responses of a list": lambda text, rest: {
        "input": [
            {"role": "developer", "content": "You answer in one word."},
            {"role": "user", "content": [{"type": "input_text", "text": text}]},
            *([{"role": "assistant", "content": rest}, {"role": "user", "content": rest}] if rest else []),
        ]
    },
}
"""By endpoint of /v1 and form: the body of a conversation's turn that begins with a text, without and with a rest."""


@pytest.mark.parametrize("form", TURNS_OF)
def test_other_endpoints_keep_a_conversation_at_one_replica(proxy, form):
    """Of conversations that begin otherwise not all are at the same."""
    used = set()
    for number in range(16):
        text = f"{number} is the number of this conversation. " + 300 * "."
        with proxy.reached() as reached:
            for rest in ("", " And then?"):
                body = {"model": NAME, **TURNS_OF[form](text, rest)}
                body |= {"max_tokens": 1} if form == "completions" else {"max_output_tokens": 1}
                assert proxy.ask(body, path=form.partition(" ")[0]).status_code == 200
        (port,) = reached
        used.add(port)
    assert len(used) == 2


def test_the_key_passes_the_proxy(proxy, replicas):
    """And a request without it is refused by the one replica that it reaches, and not asked for again elsewhere."""
    assert proxy.ask(chat("Hi", tokens=1)).status_code == 200
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer another"}):
        with proxy.reached() as reached:
            refused = proxy.ask(chat("Hi", tokens=1), **headers)
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert len(reached) == 1


def test_tritons_grpc_passes_the_proxy(proxy, replicas):
    """Streams reach their session's replica; while it stops, they run to their ends, and new ones are elsewhere."""

    def ask_for(tokens: int, session: str) -> GrpcStream:
        asked = GrpcStream(f"127.0.0.1:{proxy.grpc}", {SESSION: session})
        fields = {"max_tokens": tokens, "min_length": tokens, "stream": True, "return_num_output_tokens": True}
        asked.send(text_input=f"Story {next(STORIES)}", **fields)
        return asked

    def tokens(asked: GrpcStream) -> int:
        numbers = [result.as_numpy("num_output_tokens") for result in asked.receive_all()]
        asked.close()
        return sum(int(number.sum()) for number in numbers if number is not None)

    at = {}
    for session in (f"chat {number}" for number in range(16)):
        with proxy.reached("grpc") as reached:
            assert [tokens(ask_for(2, session)) for _ in range(2)] == [2, 2]
        (at[session],) = reached
    assert len({*at.values()}) == 2

    victim, other = replicas
    port = victim.settings.grpc_port
    session = next(session for session in at if at[session] == port)
    long = ask_for(200, session)
    begun = int(long.receive().as_numpy("num_output_tokens").sum())
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(launcher.stop, victim.run_dir.path)
        wait_until(lambda: port not in proxy.in_rotation("grpc"), 60)
        with proxy.reached("grpc") as reached:
            assert tokens(ask_for(2, session)) == 2
        assert reached == [other.settings.grpc_port]
        assert begun + tokens(long) == 200
        stopped.result()
    launcher.serve(victim.settings, victim.run_dir.path, lambda activity: None)


@contextmanager
def streams(proxy: Proxy, each: int) -> Iterator[dict[int, list[list[str]]]]:
    """Streams that run meanwhile, `each` for each replica; by its port their events, and "cut" after those of one
    whose connection ended without a last chunk."""
    sessions = proxy.sessions(each)
    events: dict[int, list[list[str]]] = {port: [[] for _ in names] for port, names in sessions.items()}

    def read(name: str, address: str, into: list[str]) -> None:
        body = chat(f"A story about {name}, number {next(STORIES)}", tokens=250, stream=True)
        url = f"http://127.0.0.1:{proxy.openai}/v1/chat/completions"
        try:
            headers = {SESSION: name, **AUTHORIZED}
            with client_at(address) as client, client.stream("POST", url, json=body, headers=headers) as answer:
                for line in answer.iter_lines():
                    into += [line[6:]] if line.startswith("data: ") else []
        except httpx.TransportError:
            into.append("cut")

    given = [(name, into) for port, names in sessions.items() for name, into in zip(names, events[port], strict=True)]
    threads = [
        threading.Thread(target=read, args=(name, f"127.0.2.{number + 1}", into))
        for number, (name, into) in enumerate(given)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(into for _, into in given), 60)  # an answer that has not begun is asked for again elsewhere
    yield events
    for thread in threads:
        thread.join()


def test_a_replica_that_is_killed_costs_its_own_streams_only(proxy, replicas):
    """Whole answers that it had not begun to send are asked for again elsewhere, all at once."""
    victim, other = replicas
    port = victim.settings.openai_port
    session = proxy.sessions(1)[port][0]
    with ThreadPoolExecutor(8) as pool, streams(proxy, 3) as events:
        asked = proxy.replicas()[port][1]
        begun = [
            pool.submit(proxy.ask, chat(f"Long answer {i}", tokens=100), f"127.0.3.{i + 1}", **{SESSION: session})
            for i in range(8)
        ]
        wait_until(lambda: proxy.replicas()[port][1] >= asked + len(begun), 120)
        psutil.Process(victim.state.supervisor_pid).kill()  # first, or it would start the others again
        for process in owned_processes(victim.run_dir.path):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        answers = [proxy.ask(chat(f"Question {i}", tokens=4), **{SESSION: f"s {i}"}) for i in range(8)]
    assert [answer.text for answer in (*(one.result() for one in begun), *answers) if answer.status_code != 200] == []
    assert [stream[-1] for stream in events[port]] == ["cut"] * 3
    assert [stream[-1] for stream in events[other.settings.openai_port]] == ["[DONE]"] * 3
    wait_until(lambda: port not in proxy.in_rotation(), 120)
    launcher.stop(victim.run_dir.path)
    launcher.serve(victim.settings, victim.run_dir.path, lambda activity: None)
    wait_until(lambda: port in proxy.in_rotation(), 120)


def test_streams_of_an_engine_that_is_killed_end_with_an_error_event(proxy, replicas):
    other, victim = replicas
    with streams(proxy, 3) as events:
        psutil.Process(victim.state.worker_pid).kill()
    assert all("error" in json.loads(stream[-1]) for stream in events[victim.settings.openai_port])
    assert [stream[-1] for stream in events[other.settings.openai_port]] == ["[DONE]"] * 3


@pytest.fixture
def next_bundle(smollm2: Path) -> Path:
    """The model in another precision."""
    folder = OF_TESTS / "engines" / f"{NAME}-int8"
    with one_process():
        options = ["--no-drafter", "--precision", "int8", "--output", folder, "--replace"]
        run_script("build/build_engines.py", "--model", smollm2, *options)
    return folder


def served(replica: Service) -> list[str]:
    """What a replica's metrics say of its bundle."""
    metrics = HTTP.get(f"http://127.0.0.1:{replica.settings.openai_port}/metrics").text
    return [line for line in metrics.splitlines() if line.startswith("redraft_bundle_info")]


def test_no_request_fails_while_all_replicas_are_upgraded(proxy, replicas, next_bundle):
    """To another bundle, one after the other, by the name that the model had."""
    before = [served(replica) for replica in replicas]
    assert before[0] == before[1]
    over, failures, answered = threading.Event(), [], []

    def ask_on(number: int) -> None:
        while not over.is_set():
            answer = proxy.ask(
                chat(f"Client {number}, request {len(answered)}", tokens=2), address=f"127.0.1.{number + 1}"
            )
            (answered if answer.status_code == 200 else failures).append(answer.text)

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(ask_on, number) for number in range(8)]
        try:
            for replica in replicas:
                launcher.stop(replica.run_dir.path)
                new = replica.settings.model_copy(update={"bundle": next_bundle})
                launcher.serve(new, replica.run_dir.path, lambda activity: None)
                wait_until(lambda port=new.openai_port: port in proxy.in_rotation(), 120)
            wait_until(lambda: len(answered) >= 500 or failures, 120)
        finally:
            over.set()
    for client in clients:
        client.result()
    assert failures == []
    (after,), (same,) = map(served, replicas)
    assert after == same
    assert f'bundle="{next_bundle.name}"' in after
    assert [after] not in before


@pytest.mark.parametrize("direct", [False, True], ids=["proxy", "direct"])
def test_a_limit_counts_the_client_and_not_the_proxy(proxy, replicas, direct):
    """Also of a client that says to be another, to the proxy or to a replica. The proxy asks the other replica for what
    a session's own refuses, so a client has both limits."""
    port = replicas[0].settings.openai_port if direct else proxy.openai
    with ThreadPoolExecutor(16) as pool:
        greedy = [
            pool.submit(
                ask,
                port,
                chat(f"Greedy {direct} {i}", tokens=150),
                "127.0.0.2",
                **{SESSION: "greedy", "X-Forwarded-For": f"10.0.0.{i}"},
            )
            for i in range(14)
        ]
        time.sleep(1)
        modest = pool.submit(ask, port, chat("Modest", tokens=4), "127.0.0.3").result()
    answers = [one.result() for one in greedy]
    assert modest.status_code == 200
    assert [answer.status_code for answer in answers].count(200) >= (4 if direct else 8)
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {(answer.status_code, answer.headers["Retry-After"]) for answer in refused} == {(429, "1")}


def test_a_foreign_host_is_refused_through_the_proxy(proxy):
    assert proxy.ask(chat("Hi", tokens=1), Host="evil.example").status_code == 403
