"""What is refused, with OpenAI's status and shape; whatever is sent, the server never fails."""

from __future__ import annotations

import contextlib
import json

import httpx
import openai
import pytest

from redraft.openai.service import MAX_BODY_BYTES
from tests.openai.serving import MODEL
from tests.serving.client_side import HTTP

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
ONCE = {"prompt": "Once"}


def chat(**fields):
    return CHAT, HELLO | fields


def text(**fields):
    return TEXT, ONCE | fields


def content(value):
    return CHAT, {"messages": [{"role": "user", "content": value}]}


CASES = [
    (chat(model="other"), 404, "model", "does not exist"),
    (chat(model="toy-model:my-lora"), 404, "model", "adapters"),
    (chat(temperature=-1), 400, "temperature", "greater than or equal to 0, got -1"),
    (chat(temperature="hot"), 400, "temperature", "valid number, got 'hot'"),
    (chat(temperature=float("nan")), 400, "temperature", "finite"),
    (chat(temperature=float("inf")), 400, "temperature", "finite"),
    (chat(top_p=2), 400, "top_p", "less than or equal to 1"),
    (chat(n=0), 400, "n", "greater than or equal to 1"),
    (chat(n=10**6), 400, "n", "less than or equal to 128"),
    (chat(max_tokens=True), 400, "max_tokens", "valid integer, got True"),
    (chat(max_tokens=0), 400, "max_tokens", "greater than or equal to 1"),
    (chat(max_completion_tokens=500), 400, "max_completion_tokens", "expected at most 234 after a prompt of 22 tokens"),
    (chat(seed=2**64), 400, "seed", "less than"),
    (chat(seed=1.5), 400, "seed", "valid integer"),
    (chat(logit_bias={"a": 1}), 400, "logit_bias.a", "logit_bias.a: expected a token id, got 'a'"),
    (chat(logit_bias={"5": 101}), 400, "logit_bias.5", "less than or equal to 100"),
    (chat(logit_bias={"999": 1}), 400, "logit_bias", "logit_bias: expected token ids below 111"),
    (chat(top_logprobs=3), 400, "top_logprobs", "top_logprobs: expected only with logprobs true"),
    (
        chat(stream_options={"include_usage": True}),
        400,
        "stream_options",
        "stream_options: expected only with stream true",
    ),
    (chat(surprise=1), 400, "surprise", "unknown field"),
    (chat(drafting_method="magic"), 400, "drafting_method", "expected one of toy, auto_regressive, got 'magic'"),
    (chat(drafting_method="toy", speculative=False), 400, "speculative", "expected true"),
    (chat(modalities=["text", "audio"]), 400, "modalities", "text only"),
    (chat(stop=5), 400, "stop", "stop: expected a text or a list of texts, got 5"),
    (chat(stop=["x"] * 65), 400, "stop", "at most 64 items, got 65"),
    (chat(stop=["x" * 1000] * 5), 400, "stop", "stop: expected at most 4096 characters in all, got 5000"),
    (content(None), 400, "messages", "messages[0].content: expected a text"),
    (content(5), 400, "messages", "messages[0].content: expected a text"),
    (content([{"type": "image_url", "image_url": {"url": "data:,"}}]), 400, "messages", "'image_url': text only"),
    (content([{"type": "text"}]), 400, "messages", "messages[0].content[0].text: expected a text"),
    ((CHAT, {"messages": []}), 400, "messages", "at least 1 item"),
    (
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}),
        400,
        "messages[0].role",
        "messages[0].role: input should be 'system', 'developer'",
    ),
    ((CHAT, {}), 400, "messages", "required field is missing"),
    (content("x" * 300), 400, "messages", "the prompt has 317 tokens: expected at most 255"),
    (content("x" * 100_000), 400, "messages", "bytes cannot fit a context of 256 tokens"),
    (text(prompt=""), 400, "prompt", "at least one token"),
    (text(prompt=[]), 400, "prompt", "expected a text, token ids, or a list of either"),
    (text(prompt=[[1], [-1]]), 400, "prompt", "expected a text, token ids, or a list of either"),
    (text(prompt=[1, "a"]), 400, "prompt", "expected a text, token ids, or a list of either"),
    (text(prompt=[999]), 400, "prompt", "token ids below 111, got 999"),
    (text(**dict.fromkeys(map(str, range(10_000)), 1)), 400, None, "expected at most 256 fields, got 10001"),
    (text(stop=[1] * 10_001), 400, "stop", "expected at most 10000 items, got 10001"),
    (text(logit_bias=dict.fromkeys(map(str, range(10_001)), "x")), 400, "logit_bias", "at most 10000 items"),
    (text(prompt=["a"] * 129), 400, "prompt", "at most 128 items"),
    (text(prompt=["a", "b"], n=100), 400, "n", "at most 128 choices in all, got 200"),
    (text(max_tokens=-1), 400, "max_tokens", "greater than or equal to 0, got -1"),
    (text(min_p=2), 400, "min_p", "less than or equal to 1"),
    (text(stop_token_ids=[999]), 400, "stop_token_ids", "stop_token_ids: expected token ids below 111, got 999"),
    (chat(prompt_logprobs=21), 400, "prompt_logprobs", "less than or equal to 20"),
    (text(best_of=3), 400, "best_of", "as many as n, 1"),
    (text(suffix="end"), 400, "suffix", "expected prompt only"),
    (text(logprobs=21), 400, "logprobs", "less than or equal to 20"),
]


@pytest.mark.parametrize(("request_", "status", "param", "message"), CASES)
def test_a_refusal_names_the_field(server, request_, status, param, message):
    path, body = request_
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b"7", b'"text"', b"\xff\xfe", b'{"prompt": "\xc3"}', b'{"prompt": "\\ud800"}',
        b'{"\\udfff": 1}', b"[" * 500_000, b'{"a":' * 500_000, b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"prompt": 1e999}', b'{"prompt": ' + b"9" * 5000 + b"}", b"{}" * 2, b"\x00" * 100,
    ],
)  # fmt: skip
def test_what_is_no_request_is_a_400(server, body):
    for path in (CHAT, TEXT):
        answer = server.post(path, body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "body is" in answer.json()["error"]["message"] or b"prompt" in body


def test_a_message_that_the_template_cannot_write(server):
    answer = server.post(CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_a_body_that_is_too_large(server):
    answer = server.post(TEXT, b" " * (MAX_BODY_BYTES + 1))
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")

    def chunks():
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    headers = {"Content-Type": "application/json"}
    with contextlib.suppress(httpx.WriteError):  # it closes the connection while this side is sending
        assert HTTP.post(f"{server.url}{TEXT}", content=chunks(), headers=headers).status_code == 413
    assert server.health() == 200


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", ""])
def test_only_json_is_taken(server, kind):
    """What a form of a web page may send without asking first."""
    answer = server.post(TEXT, json.dumps(ONCE).encode(), {"Content-Type": kind})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    packed = server.post(TEXT, b"packed", {"Content-Type": "application/json", "Content-Encoding": "gzip"})
    assert (packed.status_code, "expected identity, got 'gzip'" in packed.json()["error"]["message"]) == (415, True)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/page", 404), ("GET", "/docs", 404), ("GET", "/openapi.json", 404), ("POST", "/v1/embeddings", 404),
     ("POST", "/chat/completions", 404), ("POST", f"{CHAT}/", 404),
     ("GET", CHAT, 405), ("POST", "/v1/models", 405), ("DELETE", f"/v1/models/{MODEL}", 405)],
)  # fmt: skip
def test_what_is_not_there(server, method, path, status):
    answer = HTTP.request(method, f"{server.url}{path}")
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    message = answer.json()["error"]["message"]
    assert f"unknown path '{path}': expected one of {CHAT}" in message or f"{method} is not for this path" in message


def test_the_openai_package_raises_its_own_errors(server):
    client = server.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", **HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as invalid:
        client.chat.completions.create(model=MODEL, max_tokens=10_000, **HELLO)
    assert (invalid.value.code, invalid.value.param) == ("context_length_exceeded", "max_tokens")
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[picture])
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "messages")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
