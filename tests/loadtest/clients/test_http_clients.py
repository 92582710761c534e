"""The clients of Triton's HTTP streams and of /v1, against a stand-in server: what they send, and what they make of
answers, errors and broken streams."""

import asyncio
import json

import pytest
from aiohttp import web

from redraft.loadtest.clients.base import Generation, GenerationError
from redraft.loadtest.clients.connect import address, connect
from redraft.metrics import read

SAMPLING = {"temperature": 0.5, "seed": 7, "min_length": 3}
TALK = ({"role": "user", "content": "hi"},)


class StandIn:
    """Answers each POST with the given events, and a status; `cut` breaks the connection after them."""

    def __init__(self, lines, status=200, cut=False):
        self.lines, self.status, self.cut = lines, status, cut
        self.asked = []

    async def answer(self, request):
        self.asked.append((request.path, await request.json(), request.headers.get("Authorization")))
        if self.status != 200:
            return web.Response(status=self.status, text=self.lines)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for line in self.lines:
            await response.write(f"data: {line if isinstance(line, str) else json.dumps(line)}\n\n".encode())
        if self.cut:
            request.transport.close()
        return response

    def talk(self, protocol, generation, model=None):
        async def run():
            async def models(_):
                return web.json_response({"data": [{"id": "first"}]}, status=self.status)

            async def live(_):
                return web.Response()

            app = web.Application()
            app.router.add_post("/{path:.*}", self.answer)
            app.router.add_get("/v1/models", models)
            app.router.add_get("/v2/health/live", live)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            try:
                client = await connect(protocol, f"127.0.0.1:{port}", model, None)
                try:
                    assert await client.counters() == {}
                    return [piece async for piece in client.stream(generation)]
                finally:
                    await client.close()
            finally:
                await runner.cleanup()

        return asyncio.run(run())


def test_triton_http():
    server = StandIn([{"text_output": "a b"}, {"text_output": " ü"}])
    pieces = server.talk("http", Generation("hi", 9, SAMPLING, ("no",), "eagle", TALK))
    assert [piece.text for piece in pieces] == ["a b", " ü"]
    assert server.asked[0][:2] == (
        "/v2/models/ensemble/generate_stream",
        {
            "text_input": "hi", "max_tokens": 9, "stream": True, "exclude_input_in_output": True, "temperature": 0.5,
            "random_seed": 7, "min_length": 3, "bad_words": ["no"], "drafting_method": "eagle",
        },
    )  # fmt: skip


def test_chat_completions(monkeypatch):
    monkeypatch.setenv("REDRAFT_API_KEY", "secret")
    events = [{"choices": [{"delta": {"role": "assistant", "content": text}}]} for text in ("", "a", " b")]
    end = {"choices": [], "usage": {"completion_tokens": 5}, "metrics": {"seed": 7}}
    server = StandIn([*events, end, "[DONE]"])
    pieces = server.talk("openai", Generation("user hi", 9, SAMPLING, method="eagle", messages=TALK))
    assert "".join(piece.text for piece in pieces) == "a b"
    assert (pieces[-1].output_tokens, pieces[-1].statistics) == (5, {"seed": 7})
    assert server.asked == [
        (
            "/v1/chat/completions",
            {
                "model": "first", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True,
                "stream_options": {"include_usage": True}, "temperature": 0.5, "seed": 7, "min_tokens": 3,
                "drafting_method": "eagle",
            },
            "Bearer secret",
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("protocol", "event"), [("http", {"text_output": "a"}), ("openai", {"choices": [{"text": "a"}]})]
)
def test_the_text_of_a_chat_gets_no_special_tokens(protocol, event):
    server = StandIn([event, "[DONE]"][: 1 + (protocol == "openai")])
    server.talk(protocol, Generation("<s>hi", 9, add_special_tokens=False))
    body = server.asked[0][1]
    assert body["add_special_tokens"] is False
    assert "drafting_method" not in body, "which other servers do not know"


@pytest.mark.parametrize(
    ("protocol", "server", "message"),
    [
        ("http", StandIn('{"error": "no such field"}', 400), "status 400: no such field"),
        ("http", StandIn([{"text_output": "a"}, {"error": "the queue is full"}]), "the queue is full"),
        ("http", StandIn([{"text_output": "a"}], cut=True), "generate_stream: "),
        (
            "http",
            StandIn([{"text_output": "a"}, '{"text_out']),
            "expected a JSON object as an event, got '{\"text_out'",
        ),
        ("http", StandIn([{"model_name": "ensemble"}]), "expected text_output in each event, got '{\"model_name"),
        ("openai", StandIn(['{"choices": [{']), "expected a JSON object as an event"),
        ("openai", StandIn([{"error": {"message": "gone"}}]), "gone"),
        ("openai", StandIn([{"choices": []}]), r"ended before \[DONE\]"),
        ("openai", StandIn("<html>", 503), "status 503"),
    ],
)
def test_refusals_and_broken_streams(protocol, server, message):
    with pytest.raises(GenerationError, match=message):
        server.talk(protocol, Generation("hi", 9))


def test_addresses():
    assert address("grpc", None) == "127.0.0.1:8001"
    assert address("http", None) == "http://127.0.0.1:8000"
    assert address("openai", "host:9/v1/") == "http://host:9"
    assert address("openai", "https://host") == "https://host"


def test_counters_are_summed_over_labels():
    page = 'redraft_drafted{model="a"} 1\nredraft_drafted{model="b"} 2.5\nredraft_x_bucket{le="1"} 9\nother 3\n'
    assert read(page) == {"drafted": 3.5}
