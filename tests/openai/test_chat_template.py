"""Conversations as chat templates take them."""

from __future__ import annotations

import json

import pytest
from jinja2 import TemplateError

from redraft.chat import ChatTemplate

CALL = {"function": {"name": "f", "arguments": '{"a": [1]}'}}


def render(source: str, message: dict, **options) -> str:
    return ChatTemplate(source).render([message], **options)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "a"}, "a"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ""),
        ({"role": "assistant"}, ""),
    ],
)
def test_content_is_one_text(message, expected):
    """Most templates add it to a text, where a list or None would fail."""
    assert render("{{ '' + messages[0].content }}", message) == expected


def test_arguments_are_values_and_json_is_plain():
    """Templates write arguments as JSON: a text would be quoted twice, and Jinja's own filter escapes < for HTML."""
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}{{ tools | tojson }}"
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert render(source, message, tools=[{"a": "<é>"}]) == '{"a": [1]}[{"a": "<é>"}]'


ARGUMENTS = [
    ('{"a": 1, "b": "x"}', {"a": 1, "b": "x"}),
    ("", {}),
    ("{}", {}),
    ("null", {}),
    (None, {}),
    ({"a": 1}, {"a": 1}),
    ('{"a": "line\n\tend"}', {"a": "line\n\tend"}),
    ('{"a": [1, 2,], "b": "x,]",\n}', {"a": [1, 2], "b": "x,]"}),
    ('{"a": "cut of', {"a": "cut of"}),
    ('{"a": "cut\nof \\', {"a": "cut\nof "}),
    ('{"a": 1, "b', {"a": 1}),
    ("{", {}),
    ('{"a": 1}}', {"a": 1}),
    ('{"a": 1e999, "b": [-1e999]}', {"a": 1.7976931348623157e308, "b": [-1.7976931348623157e308]}),
    ('{"a": NaN}', {"a": None}),
    ('{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
    ('"{}"', {"arguments": "{}"}),
    ("[1]", {"arguments": [1]}),
    ("5", {"arguments": 5}),
    ("a=1", {"arguments": "a=1"}),
    ('{"a": }', {"arguments": '{"a": }'}),
    ("[" * 500, {"arguments": "[" * 500}),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS)
def test_arguments_are_always_an_object(arguments, expected):
    """Templates ask for its items, and clients send back what a model wrote, whole or not."""
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    source = "{% for name, value in messages[0].tool_calls[0].function.arguments | items %}{{ name }}{% endfor %}"
    assert render(source, message) == "".join(expected)
    text = render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", message)
    assert json.loads(text, parse_constant=pytest.fail) == expected


def test_templates_that_add_arguments_to_a_text_get_a_text():
    """As DeepSeek's do."""
    message = {"role": "assistant", "tool_calls": [CALL]}
    assert render("{{ 'f' + messages[0].tool_calls[0].function.arguments }}", message) == 'f{"a": [1]}'


def test_thoughts_have_one_name():
    message = {"role": "assistant", "content": "a"}
    for name in ("reasoning", "reasoning_content"):
        assert render("{{ messages[0].reasoning_content }}", message | {name: "hm"}) == "hm"


def test_no_tools_are_none():
    """Templates ask whether tools are defined and none."""
    assert render("{{ tools is none }}", {"role": "user", "content": "a"}, tools=[]) == "True"


@pytest.mark.parametrize(("source", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_is_the_system_where_the_template_knows_none(source, role):
    assert render(source + "{{ messages[0].role }}", {"role": "developer", "content": "a"}) == role


def test_fields_of_nothing_are_absent():
    """The openai package sends an answer back with all of its fields; templates ask which there are."""
    message = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}
    assert render("{{ messages[0] | list | sort | join(' ') }}", message) == "content role"


def test_other_fields_reach_the_template():
    assert render("{{ messages[0].name }}", {"role": "user", "content": "a", "name": "me"}) == "me"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "a"}, r"messages\[0\]: expected a map with the texts role and content"),
        ("a", r"messages\[0\]: expected a map"),
        (
            {"role": "user", "content": None},
            r"messages\[0\].content: expected a text or a list of text parts, got None",
        ),
        ({"role": "user", "content": ["a"]}, r"messages\[0\].content\[0\]: expected a part of type text, got 'a'"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, r"content\[0\].text: expected a text, got 1"),
        ({"role": "assistant", "tool_calls": 5}, r"tool_calls: expected a list of calls, got 5"),
        ({"role": "assistant", "tool_calls": ["x"]}, r"tool_calls: expected function.name and function.arguments"),
    ],
)
def test_another_form_is_refused(message, said):
    with pytest.raises(ValueError, match=said):
        render("x", message)


def test_what_a_template_cannot_do_is_no_crash():
    with pytest.raises(ValueError, match="cannot write these messages: TypeError"):
        render("{{ 1 + messages[0].content }}", {"role": "user", "content": "a"})
    with pytest.raises(TemplateError, match="no users"):
        render("{{ raise_exception('no users') }}", {"role": "user", "content": "a"})


def test_templates_may_ask_for_the_date_and_write_json_by_their_own_options():
    """As those of Llama 3 and Mistral do, and GLM's."""
    source = "{{ strftime_now('%Y') }} {{ messages | tojson(ensure_ascii=False) }}"
    text = render(source, {"role": "user", "content": "é"})
    assert 2000 < int(text[:4]) < 3000
    assert text[5:] == '[{"role": "user", "content": "é"}]'
