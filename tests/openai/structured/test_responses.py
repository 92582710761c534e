"""Functions in `/v1/responses` with the openai package: call items, their events, and their outputs sent back."""

from __future__ import annotations

import json

import pytest

from tests.openai.serving import MODEL

ADD = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'


def asking(text: object, **fields: object) -> dict:
    return {"model": MODEL, "input": text, "tools": [ADD], "temperature": 0, **fields}


def test_a_call_is_an_item(parrot):
    answer = parrot.client().responses.create(**asking(f"So: {CALL}"))
    message, call = answer.output
    assert (answer.status, answer.output_text) == ("completed", "So:")
    assert (message.type, message.status) == ("message", "completed")
    assert (call.type, call.name, json.loads(call.arguments), call.status) == (
        "function_call", "add", {"a": 12}, "completed",
    )  # fmt: skip
    assert (answer.tools[0].name, answer.tool_choice) == ("add", "auto")


def test_a_stream_builds_items_up(parrot):
    asked = asking(f"So: {CALL} Done.")
    whole = parrot.client().responses.create(**asked)
    events = list(parrot.client().responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    distinct = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    done = ["output_item.done"]
    assert distinct == ["created", "in_progress", *message, *done, *call, *done, *message, *done, "completed"]
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 1
    assert {(piece.output_index, piece.item_id) for piece in pieces} == {(1, events[-1].response.output[1].id)}
    assert "".join(piece.delta for piece in pieces) == whole.output[1].arguments
    texts = [item.to_dict() | {"id": "", "call_id": ""} for item in events[-1].response.output]
    assert texts == [item.to_dict() | {"id": "", "call_id": ""} for item in whole.output]
    dones = [event.item for event in events if event.type == "response.output_item.done"]
    assert dones == events[-1].response.output


def test_functions_in_a_loop(parrot):
    client = parrot.client()
    items: list = [{"role": "user", "content": CALL}]
    answer = client.responses.create(**asking(items))
    items += [item.to_dict() for item in answer.output]
    items.append({"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "It is 3"})
    assert client.responses.create(**asking(items)).output_text == "It is 3"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_forced_call(parrot, choice):
    asked = asking("No.", tool_choice=choice, parallel_tool_calls=False, max_output_tokens=100)
    beside = parrot.client().responses.create(**asked, text={"format": {"type": "json_object"}})
    answer = parrot.client().responses.create(**asked)
    (call,) = answer.output
    assert beside.output[0].arguments == call.arguments
    assert (answer.status, call.name, json.loads(call.arguments).keys()) == ("completed", "add", {"a"})
    assert answer.to_dict()["tool_choice"] == choice


def test_a_call_that_is_cut_off_is_incomplete(parrot):
    answer = parrot.client().responses.create(**asking(CALL, max_output_tokens=48))
    (call,) = answer.output
    assert (answer.status, call.status, call.name) == ("incomplete", "incomplete", "add")


def test_a_call_that_a_stop_word_cut_is_incomplete(parrot):
    asked = asking(CALL, extra_body={"stop": ["}"]})
    answer = parrot.client().responses.create(**asked)
    (call,) = answer.output
    assert (call.status, call.name, call.arguments) == ("incomplete", "add", '{"a": 12')
    events = list(parrot.client().responses.create(**asked, stream=True))
    assert [event.item.status for event in events if event.type == "response.output_item.done"] == ["incomplete"]


def test_log_probabilities_are_those_of_messages(parrot):
    fields = {"include": ["message.output_text.logprobs"]}
    for text, expected in ((f"So: {CALL}", "So:"), ("No call <", "No call <")):
        answer = parrot.client().responses.create(**asking(text, **fields))
        assert "".join(entry.token for entry in answer.output[0].content[0].logprobs) == expected
        streamed = [
            entry
            for event in parrot.client().responses.create(**asking(text, **fields), stream=True)
            if event.type == "response.output_text.delta"
            for entry in event.logprobs
        ]
        assert "".join(entry.token for entry in streamed) == expected


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "no hosted tools are served: expected function"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "required field is missing"),
        ({"tools": [ADD, ADD]}, "tools", "expected a name once"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "a function with its name"),
        ({"tool_choice": {"type": "function", "name": "sub"}}, "tool_choice", "got 'sub'"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice", "and guided_regex"),
    ],
)
def test_a_refusal_names_the_field(parrot, fields, param, message):
    answer = parrot.post("/v1/responses", asking("x") | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
