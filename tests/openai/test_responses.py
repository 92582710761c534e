"""`/v1/responses` with the openai package: answers, the events of a stream, and what is refused by name."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.openai.serving import MODEL, directly

SEEDED = {"temperature": 1.0, "seed": 7}
EXTRA = {"extra_body": {"seed": 7}}


def test_an_answer_is_the_workers(server):
    answer = server.client().responses.create(
        model=MODEL, input="Hello", instructions="Be brief", max_output_tokens=12, **EXTRA
    )
    expected = directly(server, "<system>Be brief<user>Hello<assistant>", 12, sampling=SEEDED)
    assert answer.output_text == expected.text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (expected.stats.prompt_tokens, 12)
    assert answer.store is False
    assert answer.metrics["speculative_decoding"]["num_spec_steps"] == expected.stats.steps


def test_a_conversation_is_sent_with_each_request(server):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ]
    tools = [{"type": "function", "name": "add", "parameters": {}}]
    answer = server.client().responses.create(model=MODEL, input=items, tools=tools, max_output_tokens=8, **EXTRA)
    rendered = '<user>a<assistant>b(add {})<tool>4[[{"type": "function", "function": {"name": "add", '
    assert answer.output_text == directly(server, rendered + '"parameters": {}}}]]<assistant>', 8, sampling=SEEDED).text


@pytest.mark.parametrize("include", [[], ["message.output_text.logprobs"]])
def test_a_stream_builds_the_answer_up(server, include):
    options = {"model": MODEL, "input": "Hello", "max_output_tokens": 12, "include": include, "top_logprobs": 2}
    whole = server.client().responses.create(**options, **EXTRA)
    events = list(server.client().responses.create(**options, **EXTRA, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.incomplete"]  # fmt: skip
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == events[-4].text == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert events[-1].response.usage.input_tokens_details.cached_tokens == whole.usage.input_tokens - 1, "asked before"
    assert {event.response.id for event in events if hasattr(event, "response")} == {events[0].response.id}
    entries = [entry for event in deltas for entry in event.logprobs]
    assert [entry.logprob for entry in entries] == [entry.logprob for entry in whole.output[0].content[0].logprobs]
    assert len(entries) == (12 if include else 0)


def test_the_packages_own_assembly_of_a_stream(server):
    text = directly(server, "<user>Hello<assistant>", 24, sampling=SEEDED).text
    extra = {"extra_body": {"seed": 7, "stop": text[10:12]}}

    async def ask() -> tuple[str, str]:
        async with server.async_client().responses.stream(model=MODEL, input="Hello", **extra) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return "".join(deltas), (await stream.get_final_response()).output_text

    assert asyncio.run(ask()) == (text[: text.index(text[10:12])],) * 2


def test_an_answer_that_the_model_ends_is_completed(server):
    bias = {"logit_bias": {"0": 100}}
    answer = server.client().responses.create(model=MODEL, input="Hello", extra_body=bias)
    assert (answer.status, answer.incomplete_details, answer.output_text) == ("completed", None, "")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"store": "yes"}, "store", "store: input should be a valid boolean"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no answer can be read again"),
        ({"conversation": "c"}, "conversation", "no answer can be read again"),
        ({"background": True}, "background", "no answer can be read again"),
        ({"tools": [{"type": "web_search"}]}, "tools", "no hosted tools are served: expected function"),
        ({"tools": [{"type": "file_search"}]}, "tools", "got 'file_search'"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'xhigh' or 'max', got 'huge'"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "not as a summary"),
        ({"truncation": "auto"}, "truncation", "no input is cut"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "expected schema with the type json_schema"),
        ({"include": ["everything"]}, "include[0]", "message.output_text.logprobs"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0].type: expected message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "got 'input_image': text only"),
        ({"input": [{"role": "user", "content": 5}]}, "input", "expected a text or a list"),
        ({"input": [{"content": "x"}]}, "input", "input[0].role: expected one of system, developer, user, assistant"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input", "assistant, got 'robot'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "assistant, got 'tool'"),
        ({"input": []}, "input", "at least one message"),
        ({"input": 5}, "input", "expected a text or a list of at most 10000 items, got 5"),
        ({"input": [{"role": "user", "content": "x"}] * 10_001}, "input", "expected a text or a list of at most 10000"),
        ({"max_output_tokens": 1000}, "max_output_tokens", "expected at most"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(server, fields, param, message):
    answer = server.post("/v1/responses", {"input": "Hello"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


def test_the_openai_package_raises_its_own_errors(server):
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        server.client().responses.create(model=MODEL, input="Hello", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        server.client().responses.create(model="other", input="Hello")
