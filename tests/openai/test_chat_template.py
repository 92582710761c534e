"""Conversations as chat templates take them."""

from __future__ import annotations

import json

import pytest

from redraft.chat import ChatTemplate, Writing, effort_options, encode_user_turn, template_digest
from redraft.templates.renderer import TemplateError
from tests.toy_engine import toy_codec

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


USER = {"role": "user", "content": "a"}
CODEC = toy_codec()


def test_generation_blocks_are_their_text():
    """SmolLM3's template marks the assistant's text for training with them."""
    source = "{% for m in messages %}{%- generation %}<{{ m.content }}>{% endgeneration -%}{% endfor %}"
    assert render(source, USER) == "<a>"
    inner = "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}"
    assert render(inner, USER) == "1False"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", '{"b": 1, "a": ["<é>"]}'),
        ("separators=(',', ':')", '{"b":1,"a":["<é>"]}'),
        ("sort_keys=true", '{"a": ["<é>"], "b": 1}'),
        ("ensure_ascii=true", '{"b": 1, "a": ["<\\u00e9>"]}'),
        ("indent=1, separators=(',', ': ')", '{\n "b": 1,\n "a": [\n  "<é>"\n ]\n}'),
    ],
)
def test_json_is_written_as_templates_ask(arguments, expected):
    source = f"{{{{ tools[0] | tojson({arguments}) }}}}"
    assert ChatTemplate(source).render([USER], [{"b": 1, "a": ["<é>"]}]) == expected


def test_loops_can_be_left():
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
    )
    assert render(source + "{% endfor %}", USER) == "02"


def folder_with(tmp_path, config=None, **templates):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config or {}))
    for name, source in templates.items():
        file = tmp_path / "chat_template.jinja"
        if name != "default":
            file = tmp_path / "additional_chat_templates" / f"{name}.jinja"
            file.parent.mkdir(exist_ok=True)
        file.write_text(source)
    return tmp_path


def test_all_special_tokens_are_in_the_scope(tmp_path):
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "image_token": "<image>",
        "unk_token": None,
        "add_bos_token": True,
        "extra_special_tokens": ["<x>", {"content": "<y>"}],
    }
    source = (
        "{{ bos_token ~ eos_token ~ image_token ~ additional_special_tokens | join('') }}"
        "{{ unk_token is defined or add_bos_token is defined }}"
    )
    template = ChatTemplate.load(folder_with(tmp_path, config, default=source))
    assert template.render([USER]) == "<s></s><image><x><y>False"
    assert template.render([USER], writing=Writing({"bos_token": "!"})).startswith("!</s>")


@pytest.mark.parametrize("listed", [True, False])
def test_a_template_for_tools_is_taken_with_tools(tmp_path, listed):
    sources = {"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "{{ documents }}"}
    if listed:
        entries = [{"name": name, "template": source} for name, source in sources.items()]
        folder = folder_with(tmp_path, {"chat_template": entries})
    else:
        folder = folder_with(tmp_path, **sources)
    template = ChatTemplate.load(folder)
    assert template.takes_tools
    assert template.render([USER]) == "plain"
    assert template.render([USER], [{"type": "function"}]) == "1 tools"


def test_a_model_without_a_default_template_says_so(tmp_path):
    template = ChatTemplate.load(folder_with(tmp_path, tool_use="{{ tools }}", rag="x"))
    with pytest.raises(TemplateError, match="the chat templates rag, tool_use, none of which is the default"):
        template.check()
    assert template.render([USER], [{}]) == "[{}]"


def test_a_template_that_cannot_be_read_is_found_when_it_is_asked(tmp_path):
    template = ChatTemplate("{% if %}")
    for ask in (template.check, lambda: template.render([USER])):
        with pytest.raises(TemplateError, match="the chat template cannot be read: line 1"):
            ask()
    assert encode_user_turn(folder_with(tmp_path, default="{% if %}"), CODEC, "as it is") == CODEC.encode("as it is")


def test_options_reach_the_template():
    source = "{{ enable_thinking }} {{ documents }} {{ add_generation_prompt }}"
    assert ChatTemplate(source).render([USER]) == " None True"
    writing = Writing({"enable_thinking": False}, [{"title": "t"}], add_generation_prompt=False)
    assert ChatTemplate(source).render([USER], writing=writing) == "False [{'title': 't'}] False"
    with pytest.raises(ValueError, match="chat_template_kwargs: expected messages as a field of its own"):
        Writing({"messages": []})


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("{{ messages[-1].content }}<end>{% if add_generation_prompt %}<next>{% endif %}", "Well, ", "Well, "),
        ("{{ messages[-1].content | trim }}<end>", "Well, ", "Well,"),
        ("{{ messages[-1].content.split('</think>')[-1] }}<end>", "<think>x</think>\ny", "\ny"),
        ("{{ messages[-1].content }}<end>", "", ""),
    ],
)
def test_the_last_message_is_continued(source, content, expected):
    said = [USER, {"role": "assistant", "content": content}]
    assert ChatTemplate("{{ messages[0].content }}" + source).render(
        said, writing=Writing(continue_final_message=True)
    ) == ("a" + expected if expected else "a")


def test_a_message_that_is_left_out_cannot_be_continued():
    with pytest.raises(ValueError, match="continue_final_message: the chat template leaves the last message out"):
        ChatTemplate("x").render([USER], writing=Writing(continue_final_message=True))
    with pytest.raises(ValueError, match="continue_final_message: expected add_generation_prompt false"):
        Writing(continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    "value", [5, ["plain"], [{"template": "plain"}], [{"name": "default", "template": None}], {"default": "plain"}]
)
def test_templates_in_no_known_form_cannot_be_read(value, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(TemplateError, match="chat_template: expected a text or a list of name and template, got "):
        ChatTemplate.load(tmp_path)
    assert encode_user_turn(tmp_path, CODEC, "Hi") == CODEC.encode("Hi")
    assert template_digest(tmp_path) is None


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("minimal", True), ("high", True), ("max", True)])
def test_an_effort_of_reasoning_is_told_to_all_templates(effort, thinks):
    """Those that do not know it are unaffected."""
    source = "{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}"
    writing = Writing(effort_options(effort))
    assert ChatTemplate(source).render([USER], writing=writing) == f"{effort} {thinks} {thinks}"
    assert ChatTemplate("x").render([USER], writing=writing) == "x"
    assert effort_options(None) == {}
    with pytest.raises(ValueError, match=r"reasoning_effort: expected one of none, .*, max, got 'lots'"):
        effort_options("lots")
