"""Tools in chat completions with the openai package: calls that the model chooses, calls that it must make."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.openai.serving import MODEL

CHAT = "/v1/chat/completions"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def asking(text: str, *tools: dict, **fields: object) -> dict:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "tools": list(tools), "temperature": 0, **fields}


def calls_of(message) -> list[tuple[str, dict]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def test_a_call_that_the_model_chooses(parrot):
    answer = parrot.client().chat.completions.create(**asking(f"I will add.\n{called('add', a=1, b=2)}", ADD))
    (choice,) = answer.choices
    assert choice.message.content == "I will add."
    assert calls_of(choice.message) == [("add", {"a": 1, "b": 2})]
    assert choice.message.tool_calls[0].id.startswith("call_")
    assert choice.finish_reason == "tool_calls"


def test_an_answer_without_a_call(parrot):
    answer = parrot.client().chat.completions.create(**asking("No <tools> needed. ", ADD))
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("No <tools> needed. ", None)
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_of_calls(parrot):
    """As agents read it: the index says which call a piece belongs to, its first piece says the name."""
    asked = asking(f"So: {called('add', a=1, b=2)}\n{called('now')}", ADD, NOW)
    events = list(parrot.client().chat.completions.create(**asked, stream=True))
    deltas = [event.choices[0].delta for event in events]
    assert "".join(delta.content or "" for delta in deltas) == "So:"
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    heads = [piece for piece in pieces if piece.id]
    assert [(piece.index, piece.type, piece.function.name, piece.function.arguments) for piece in heads] == [
        (0, "function", "add", ""), (1, "function", "now", ""),
    ]  # fmt: skip
    texts = ["".join(piece.function.arguments for piece in pieces if piece.index == index) for index in (0, 1)]
    assert [json.loads(text) for text in texts] == [{"a": 1, "b": 2}, {}]
    assert sum(piece.index == 0 for piece in pieces) > 2, "arguments come piece by piece"
    assert [event.choices[0].finish_reason for event in events][-1] == "tool_calls"


def test_the_packages_own_assembly_of_a_stream(parrot):
    async def ask():
        asked = asking(f"So: {called('add', a=1, b=2)}", ADD)
        async with parrot.async_client().chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_completion()

    (choice,) = asyncio.run(ask()).choices
    assert (choice.finish_reason, calls_of(choice.message)) == ("tool_calls", [("add", {"a": 1, "b": 2})])


def test_calls_that_are_not_parallel_are_one(parrot):
    asked = asking(called("now") + called("now"), NOW)
    for parallel in (True, False):
        answer = parrot.client().chat.completions.create(**asked, parallel_tool_calls=parallel)
        assert len(answer.choices[0].message.tool_calls) == 1 + parallel


def test_a_call_that_is_cut_off(parrot):
    answer = parrot.client().chat.completions.create(**asking(called("add", a=1, b=2), ADD), max_tokens=56)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "add"
    assert '{"a": 1, "b": 2}'.startswith(choice.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("cut", [{"stop": ["}"]}, {"stop": ["2"]}, {"max_tokens": 30}])
def test_a_call_that_is_cut_is_not_reported_as_whole(parrot, choice, cut):
    """It goes back as it came, too."""
    client, asked = parrot.client(), asking(called("add", a=1, b=2), ADD, tool_choice=choice)
    (answer,) = client.chat.completions.create(**asked, **cut).choices
    assert answer.finish_reason == ("length" if "max_tokens" in cut else "stop")
    for call in answer.message.tool_calls or ():
        assert '{"a": 1, "b": 2}'.startswith(call.function.arguments)
    asked["messages"] = [*asked["messages"], answer.message, {"role": "user", "content": "Go on"}]
    assert client.chat.completions.create(**asked | {"tool_choice": "none"}).choices[0].message.content == "Go on"


def test_a_forced_call_that_is_cut_before_its_name_is_no_text(parrot):
    asked = asking(called("add", a=1, b=2), ADD, tool_choice="required", max_tokens=4)
    (answer,) = parrot.client().chat.completions.create(**asked).choices
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ("", None, "length")
    deltas = [event.choices[0].delta for event in parrot.client().chat.completions.create(**asked, stream=True)]
    assert not any(delta.content or delta.tool_calls for delta in deltas)


def test_tools_in_a_loop(parrot):
    """The answer's message goes back as it came, with the call's result, which the parrot then says."""
    client = parrot.client()
    asked = asking(called("add", a=1, b=2), ADD)
    message = client.chat.completions.create(**asked).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is 3"}
    asked["messages"] = [*asked["messages"], message, result]
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == "It is 3"
    rendered = f'[{json.dumps([ADD])}]<user>{called("add", a=1, b=2)}<assistant>(add {{"a": 1, "b": 2}})'
    assert answer.usage.prompt_tokens == len(f"{rendered}<tool>It is 3<assistant>")


def test_none_calls_nothing(parrot):
    text = called("add", a=1, b=2)
    answer = parrot.client().chat.completions.create(**asking(text, ADD, tool_choice="none"))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
    assert answer.usage.prompt_tokens == len(f"<user>{text}<assistant>")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call(parrot, choice):
    """What the model would rather say is no call: the parrot's text is forbidden from its first character on."""
    client = parrot.client()
    for text, expected in ((called("add", a=1, b=2), {"a": 1, "b": 2}), ("No.", None)):
        asked = asking(text, ADD, tool_choice=choice, parallel_tool_calls=False, max_tokens=200)
        (choice_,) = client.chat.completions.create(**asked).choices
        ((name, arguments),) = calls_of(choice_.message)
        assert (name, choice_.finish_reason, choice_.message.content) == ("add", "tool_calls", None)
        assert arguments == (expected or arguments)
        assert arguments.keys() == {"a", "b"}


def test_several_forced_calls(parrot):
    text = "\n".join((called("add", a=1, b=2), called("now"), called("add", a=3, b=4)))
    answer = parrot.client().chat.completions.create(**asking(text, ADD, NOW, tool_choice="required"))
    assert calls_of(answer.choices[0].message) == [("add", {"a": 1, "b": 2}), ("now", {}), ("add", {"a": 3, "b": 4})]


def test_a_named_call_is_that_function(parrot):
    named = {"type": "function", "function": {"name": "now"}}
    asked = asking(called("add", a=1, b=2), ADD, NOW, tool_choice=named, max_tokens=200)
    assert calls_of(parrot.client().chat.completions.create(**asked).choices[0].message) == [("now", {})]


def test_a_call_or_an_answer_in_a_format(parrot):
    """As agents with an output type ask: what is neither a call nor in the format is forbidden."""
    schema = {"type": "object", "properties": {"c": {"type": "boolean"}}, "required": ["c"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema | {"additionalProperties": False}}}

    def ask(text: str):
        asked = asking(text, ADD, response_format=form, max_tokens=100)
        return parrot.client().chat.completions.create(**asked).choices[0].message

    assert (ask('{"c": true}').content, ask('{"c": true}').tool_calls) == ('{"c": true}', None)
    assert calls_of(ask(called("add", a=1, b=2))) == [("add", {"a": 1, "b": 2})]
    neither = ask("No.")
    assert neither.tool_calls or json.loads(neither.content).keys() == {"c"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_beside_a_format(parrot, choice):
    """The format is that of an answer's text, which there is none of."""
    schema = {"type": "object", "properties": {"c": {"type": "boolean"}}, "required": ["c"]}
    for form in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        {"type": "text"},
    ):
        fields = {"tool_choice": choice, "response_format": form, "parallel_tool_calls": False}
        (choice_,) = parrot.client().chat.completions.create(**asking(called("add", a=1, b=2), ADD, **fields)).choices
        assert (calls_of(choice_.message), choice_.finish_reason) == ([("add", {"a": 1, "b": 2})], "tool_calls")


def test_each_of_n_choices_has_its_calls(parrot):
    asked = asking(called("add", a=1, b=2), ADD, n=2)
    choices = parrot.client().chat.completions.create(**asked).choices
    assert [calls_of(choice.message) for choice in choices] == [[("add", {"a": 1, "b": 2})]] * 2
    first, second = (choice.message.tool_calls[0].id for choice in choices)
    assert first != second


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def function(**fields: object) -> dict:
    return {"tools": [{"type": "function", "function": fields}]}


REFUSED = [
    (function(parameters={}), "tools[0].function.name", "required field is missing"),
    (function(name="a b"), "tools[0].function.name", "match pattern"),
    (function(name="f", parameters={"type": "string"}), "tools[0].function.parameters", "type object, got 'string'"),
    (function(name="f", parameters=[1]), "tools[0].function.parameters", "an object, got [1]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function', got 'web_search'"),
    ({"tools": [ADD, NOW, ADD]}, "tools", "expected a name once, got 'add' 2 times"),
    ({"tools": [ADD] * 129}, "tools", "at most 128 items"),
    ({"tools": [ADD, NOW], "tool_choice": named("sub")}, "tool_choice", "one of the tools add, now, got 'sub'"),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "none, auto, required or a function with its name"),
    ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice", "a function with its name"),
    ({"tools": [ADD], "tool_choice": 1}, "tool_choice", "a function with its name, got 1"),
    ({"tool_choice": "required"}, "tool_choice", "expected tools beside it, got required without any"),
    ({"tool_choice": named("add")}, "tool_choice", "got the function 'add' without any"),
    ({"tools": [ADD], "guided_choice": ["a"]}, "tools", "tools and guided_choice: expected JSON"),
    ({"tools": [ADD], "guided_json": "{"}, "guided_json", "expected a JSON schema, got '{'"),
    ({"tools": [ADD], "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "tool_choice and guided_regex"),
    ({**function(name="f", parameters={"properties": {"a": {"$ref": "#/nowhere"}}}), "tool_choice": "required"},
     "tools", "tools: the parameters of 'f' cannot be enforced: properties.a.$ref"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_a_refusal_names_the_field(parrot, fields, param, message):
    answer = parrot.post(CHAT, {"messages": [{"role": "user", "content": "Hello"}]} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_one_tool_that_cannot_be_enforced_leaves_the_others(parrot):
    """A choice of the model is not refused for it either; a choice of that tool is, by its name and keyword."""
    unique = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    label = {"type": "function", "function": {"name": "label", "parameters": unique}}
    messages = [{"role": "user", "content": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}'}]
    body = {"messages": messages, "tools": [ADD, label], "max_tokens": 90, "temperature": 0}
    for choice in ("required", "auto"):
        answer = parrot.post(CHAT, body | {"tool_choice": choice})
        assert answer.status_code == 200, answer.text
    named = {"type": "function", "function": {"name": "label"}}
    error = parrot.post(CHAT, body | {"tool_choice": named}).json()["error"]
    assert error["param"] == "tools"
    assert "'label' cannot be enforced: properties.tags.uniqueItems: " in error["message"]


def test_large_integers_are_written_as_they_are(parrot):
    number = 1234567890123456789
    schema = {"type": "object", "properties": {"id": {"const": number}}, "required": ["id"]}
    body = {"messages": [{"role": "user", "content": f'{{"id": {number}}}'}], "max_tokens": 40, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for field in ({"guided_json": schema}, {"response_format": form}):
        answer = parrot.post(CHAT, body | field)
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.json()["choices"][0]["message"]["content"])["id"] == number
