"""Formats that a request asks for: each field as the worker's guide, two of them refused, answers that keep to them."""

from __future__ import annotations

import json

import pydantic
import pytest

from redraft.openai.errors import ApiError
from redraft.openai.schemas import ChatBody, CompletionBody, ResponsesBody
from redraft.openai.structured.formats import only_guide
from redraft.request import Guide
from tests.openai.serving import MODEL

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {
    CHAT: lambda fields: ChatBody.model_validate_json(json.dumps({"messages": MESSAGES} | fields)),
    TEXT: lambda fields: CompletionBody.model_validate_json(json.dumps({"prompt": "x"} | fields)),
    RESPONSES: lambda fields: ResponsesBody.model_validate_json(json.dumps({"input": "x"} | fields)),
}


def schema_format(**more: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA} | more}


BY_FIELD = [
    (BODIES, {"guided_json": SCHEMA}, "guided_json", Guide(kind="json_schema", text=json.dumps(SCHEMA))),
    (BODIES, {"guided_json": "{}"}, "guided_json", Guide(kind="json_schema", text="{}")),
    (BODIES, {"guided_regex": "a+"}, "guided_regex", Guide(kind="regex", text="a+")),
    (BODIES, {"guided_choice": ["a", "é"]}, "guided_choice", Guide(kind="choice", text='["a", "\\u00e9"]')),
    (BODIES, {"guided_grammar": 'start: "a"'}, "guided_grammar", Guide(kind="grammar", text='start: "a"')),
    (BODIES, {"structured_outputs": {"regex": "a"}}, "structured_outputs.regex", Guide(kind="regex", text="a")),
    (BODIES, {"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", Guide(kind="json")),
    (BODIES, {"structured_outputs": {"json": {}}}, "structured_outputs.json", Guide(kind="json_schema", text="{}")),
    ((CHAT, TEXT), {"response_format": {"type": "json_object"}}, "response_format", Guide(kind="json")),
    ((CHAT, TEXT), {"response_format": schema_format(strict=True, description=None)}, "response_format",
     Guide(kind="json_schema", text=json.dumps(SCHEMA))),
    ((RESPONSES,), {"text": {"format": {"type": "json_object"}}}, "text.format", Guide(kind="json")),
    ((RESPONSES,), {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
     "text.format", Guide(kind="json_schema", text=json.dumps(SCHEMA))),
]  # fmt: skip


@pytest.mark.parametrize(("paths", "fields", "name", "guide"), BY_FIELD)
def test_a_field_is_a_guide(paths, fields, name, guide):
    for path in paths:
        assert dict(BODIES[path](fields).guides()) == {name: guide}


@pytest.mark.parametrize(
    "fields",
    [{}, {"structured_outputs": {}}, {"structured_outputs": {"json_object": False}}, {"guided_json": None}],
)
def test_what_asks_for_no_format(fields):
    for body in BODIES.values():
        assert dict(body(fields).guides()) == {}
    assert dict(BODIES[CHAT](fields | {"response_format": {"type": "text"}}).guides()) == {}
    assert dict(BODIES[RESPONSES](fields | {"text": {"format": {"type": "text"}}}).guides()) == {}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, ("guided_json", "guided_regex")),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, ("structured_outputs.regex", "structured_outputs.gr")),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, ("response_format", "guided_choice")),
    ],
)
def test_two_formats_are_refused_by_their_names(fields, names):
    with pytest.raises(ApiError) as refused:
        only_guide(dict(BODIES[CHAT](fields).guides()))
    assert refused.value.status == 400
    assert all(name in refused.value.message for name in names)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, "expected json_schema with the type json_schema only"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "got the type text"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": schema_format(schema=5)}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "whitespace_pattern"),
        ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern"),
    ],
)
def test_what_is_no_format(fields, said):
    with pytest.raises(pydantic.ValidationError, match=said):
        BODIES[CHAT](fields)


REFUSED = [
    ({"guided_regex": ""}, "guided_regex", "expected the text of the regex"),
    ({"guided_choice": []}, "guided_choice", "expected a JSON list"),
    ({"guided_json": {"enum": ["a" * 2**18]}}, "guided_json", "at most 262144 characters"),
    ({"guided_json": {"type": "nothing"}}, "guided_json", "the json_schema cannot be used"),
    ({"guided_grammar": "start: ???"}, "guided_grammar", "the grammar cannot be used"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format",
     "at most one of response_format and guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "said", "stream"), [(*case, index % 2 == 1) for index, case in enumerate(REFUSED)]
)
def test_a_refusal_names_the_clients_field(parrot, fields, param, said, stream):
    answer = parrot.post(CHAT, {"messages": MESSAGES, "stream": stream} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert said in error["message"]
    assert "guide." not in error["message"]


def test_a_guide_that_is_too_complex_to_follow_is_an_error(parrot):
    """It shows while the answer is written: an event of a stream says so, which ends without a finish reason."""
    schema = {"type": "string", "pattern": r"^(?:\S+\s+){0,199}\S+$", "maxLength": 2000}
    body = {"messages": [{"role": "user", "content": '"one two"'}], "guided_json": schema}
    error = parrot.post(CHAT, body).json()["error"]
    assert (error["param"], "too complex" in error["message"]) == ("guided_json", True), error
    stream = parrot.post(CHAT, body | {"stream": True}).text
    assert "guided_json: the json_schema is too complex to go on with" in stream
    assert '"finish_reason":"' not in stream


def test_answers_keep_to_the_format(parrot):
    """The parrot would say the prompt; each character that breaks the format is forbidden."""
    client = parrot.client()
    options = {"model": MODEL, "temperature": 0, "max_tokens": 60}
    said = [{"role": "user", "content": '{"a": 7} and more'}]
    formats = ({"type": "json_object"}, schema_format())
    chats = [client.chat.completions.create(messages=said, response_format=one, **options) for one in formats]
    assert [chat.choices[0].message.content for chat in chats] == ['{"a": 7}'] * 2
    assert [chat.choices[0].finish_reason for chat in chats] == ["stop"] * 2
    events = client.chat.completions.create(messages=said, response_format=formats[1], stream=True, **options)
    assert "".join(event.choices[0].delta.content or "" for event in events) == '{"a": 7}'
    chosen = client.completions.create(
        prompt="<user>yes, or no<assistant>", extra_body={"guided_choice": ["yes", "no"]}, **options
    )
    assert chosen.choices[0].text == "yes"
    form = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    answer = client.responses.create(
        model=MODEL, input='{"a": 7} and more', text=form, max_output_tokens=60, temperature=0
    )
    assert (answer.output_text, answer.text.format.schema_) == ('{"a": 7}', SCHEMA)


def test_the_packages_own_parsing(parrot):
    class Found(pydantic.BaseModel):
        a: int

    said = [{"role": "user", "content": '{"a": 7}'}]
    answer = parrot.client().chat.completions.parse(model=MODEL, messages=said, response_format=Found, temperature=0)
    assert answer.choices[0].message.parsed == Found(a=7)
