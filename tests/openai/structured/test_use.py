"""Tools by what the model's chat template shows: the form of its calls, and templates that have no place for tools."""

from __future__ import annotations

import json

import pytest

from redraft.chat import NEXT_TURN
from redraft.openai.errors import ApiError
from redraft.openai.model import ServedModel
from redraft.openai.structured.forms import FORMS, tool_form
from redraft.openai.structured.tools import AUTO, Function, ToolChoice
from redraft.openai.structured.use import tool_use
from redraft.openai.translate import prompt_of
from redraft.serving.settings import ServeSettings, ToolParser
from tests.conftest import at_most
from tests.openai.serving import toy_bundle

PLAIN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
OWN = PLAIN + "{{ tools }}"
ADD = Function(name="add", parameters={"type": "object", "default": None})
USER = {"role": "user", "content": "2+2?"}


def model(tmp_path, template: str, tool_parser: str | None = None) -> ServedModel:
    return ServedModel(
        toy_bundle(tmp_path, template, vocab_size=257, max_len=1024), ServeSettings(tool_parser=tool_parser)
    )


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('For each call return <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("{{ '<\uff5ctool\u2581calls\u2581begin\uff5c>' }}\n```json", "deepseek_v3"),
        ("{{ '<\uff5ctool\u2581calls\u2581begin\uff5c>' }}", "deepseek_v31"),
        ("<start_function_call>call:{{ name }}", "functiongemma"),
        ("<|tool_call>call:{{ name }}", "gemma4"),
        ("as [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ('<|header_start|>in the format {"name": function name, "parameters": dictionary}', "llama3"),
        ('<|start_header_id|>Respond in the format {"name": function name, "parameters": dictionary}', "llama3"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ("{{ tools }}", None),
    ],
)
def test_a_form_is_recognised_by_its_template(template, form):
    assert tool_form(template) is (None if form is None else FORMS[form])


def test_the_forms_are_those_of_the_command_line():
    assert list(FORMS) == list(ToolParser)


@pytest.mark.parametrize("template", [OWN, PLAIN])
def test_where_no_form_is_known_the_prompt_asks_for_hermes(tmp_path, template):
    """Also where the template lists tools, but in a form whose calls could not be read."""
    served = model(tmp_path, template)
    for choice in (AUTO, ToolChoice("required")):
        use = tool_use([ADD], choice, True, served)
        assert use.form is FORMS["hermes"]
        text = prompt(served, [USER], use.for_template)
        assert "write its name and arguments in this form:\n<tool_call>" in text
        assert text.count('"add"') == 1
    assert tool_use([ADD], ToolChoice("none"), True, served) is None
    assert tool_use([], AUTO, True, served) is None


@pytest.mark.parametrize("template", [OWN, PLAIN])
def test_the_servers_option_settles_the_form(tmp_path, template):
    assert tool_use([ADD], AUTO, True, model(tmp_path, template, "llama3")).form is FORMS["llama3"]


def test_the_template_gets_what_was_sent(tmp_path):
    """Nulls within a schema mean something; absent fields stay absent."""
    (found,) = tool_use([ADD], ToolChoice("required"), True, model(tmp_path, OWN)).for_template
    assert found == {"type": "function", "function": {"name": "add", "parameters": ADD.parameters}}


def test_the_template_gets_numbers_that_json_has(tmp_path):
    large = Function(name="f", parameters={"type": "object", "maxProperties": float("inf")})
    (found,) = tool_use([large], AUTO, True, model(tmp_path, OWN)).for_template
    assert found["function"]["parameters"]["maxProperties"] == 1.7976931348623157e308


def prompt(served: ServedModel, messages: list[dict], tools: list[dict]) -> str:
    return served.codec.decode(served.encode(served.chat_text(messages, tools), "messages"))


def test_a_template_without_a_place_for_tools_lists_them(tmp_path):
    served = model(tmp_path, PLAIN)
    use = tool_use([ADD, Function(name="now")], ToolChoice("required", "now"), True, served)
    text = served.codec.decode(prompt_of([USER], use, served, "messages", NEXT_TURN).ids)
    system, _, rest = text.partition("<user>")
    assert rest == "2+2?<assistant><tool_call>\n"
    listed = [json.loads(line) for line in system.split("\n") if line.startswith('{"name"') and "NAME" not in line]
    assert listed == [{"name": "add", "parameters": ADD.parameters}, {"name": "now"}]
    told = prompt(served, [{"role": "system", "content": "Be brief."}, USER], use.for_template)
    assert told.startswith("<system>Be brief.\n\nYou can call functions.")
    assert told.count("<system>") == 1


def test_such_a_template_has_calls_and_results_as_text(tmp_path):
    def call(number: int) -> dict:
        return {"id": f"c{number}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {number}}}'}}

    messages = [
        USER,
        {"role": "assistant", "content": "Wait.", "tool_calls": [call(1), call(2)]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "5"}]},
        {"role": "assistant", "content": None, "tool_calls": [call(3)]},
        {"role": "tool", "tool_call_id": "c3", "content": "6"},
    ]
    calls = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>' for number in (1, 2, 3)]
    results = [f"<tool_response>\n{number}\n</tool_response>" for number in (4, 5, 6)]
    assert prompt(model(tmp_path, PLAIN), messages, []) == (
        f"<user>2+2?<assistant>Wait.\n{calls[0]}\n{calls[1]}<user>{results[0]}\n{results[1]}"
        f"<assistant>{calls[2]}<user>{results[2]}<assistant>"
    )


def test_deep_arguments_stay_a_text(tmp_path):
    """Those that can just be read could not be written."""
    served = ServedModel(toy_bundle(tmp_path, PLAIN, vocab_size=257, max_len=8192))
    for depth in range(900, 1000, 9):
        arguments = "[" * depth + "]" * depth
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        assert f'{{"arguments": "{arguments}"}}' in prompt(
            served, [USER, {"role": "assistant", "tool_calls": [call]}], []
        )


def test_many_results_take_linear_time(tmp_path):
    """16 MB in 10,000 of them: writing all anew for each would take a minute, and two such requests stop all others."""
    results = [{"role": "tool", "tool_call_id": "c", "content": "x" * 1600}] * 10_000
    with at_most(10), pytest.raises(ApiError, match="cannot fit a context"):
        prompt(model(tmp_path, PLAIN), [USER, *results], [])


def test_other_conversations_stay_as_they_are(tmp_path):
    messages = [USER, {"role": "assistant", "content": ""}, USER]
    assert prompt(model(tmp_path, PLAIN), messages, []) == "<user>2+2?<assistant><user>2+2?<assistant>"
