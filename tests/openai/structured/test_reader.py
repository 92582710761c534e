"""Answers read piece by piece: text and calls in each form, however they are cut."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from redraft.openai.answers.choices import Choice
from redraft.openai.structured.forms import (
    _DEEPSEEK_MARKS,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
    FORMS,
)
from redraft.openai.structured.reader import CallPart, CallReader
from redraft.worker.protocol import Chunk
from tests.conftest import at_most

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "day": {"$ref": "#/$defs/day"},
        "place": {"type": "object"},
        "name": {"allOf": [{"description": "a name"}, {"type": "string"}]},
    },
}
TOOLS: dict = {"add": {}, "get_weather": CITY | {"$defs": {"day": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}}
WORDS = [
    "Hello",
    " there",
    "<",
    "<tool",
    "{",
    '{"name": "Bob"}',
    "}",
    "[",
    "]",
    "\n",
    " ",
    "é",
    "</tool_call>",
    ";",
    '"',
    ",",
    "'",
    "\\",
    "(",
    ")",
    "=1",
    ":",
    "</parameter>",
    "</function>",
    "</arg_key>",
    "</arg_value>",
    "<escape>",
    "<end_function_call>",
    "\n</",
    *_DEEPSEEK_MARKS,
]
VALUES = [
    1,
    -2.5,
    None,
    True,
    "",
    'a "quoted" {text',
    "back\\slash}\\",
    "</tool_call>",
    "[ARGS]",
    [1, {"b": []}],
    {"c": "}"},
    "two\nlines\n",
    "\n",
    "a) and (b",
    "it's {x: 1}, [y]",
    "1",
    "true",
]

Call = tuple[str, dict]


def read(
    form: str, pieces: list[str], most: int | None = None, tools: dict = TOOLS, only_calls: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer, and each call's name and arguments."""
    numbers = itertools.count()
    reader = CallReader(FORMS[form].read, tools, lambda: f"c{next(numbers)}", most, only_calls)
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish()
    text, calls = "", []
    for delta in deltas:
        if isinstance(delta, str):
            assert delta
            text += delta
        elif delta.name is not None:
            assert delta == CallPart(len(calls), "", f"c{len(calls)}", delta.name)
            calls.append((delta.name, ""))
        else:
            assert delta == CallPart(len(calls) - 1, delta.arguments)
            calls[-1] = calls[-1][0], calls[-1][1] + delta.arguments
    return text, calls


def cuts(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), rng.randrange(min(len(text) + 1, 20))))
    return [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]


def hermes(calls: list[Call], rng: random.Random) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls
    )


def llama3(calls: list[Call], rng: random.Random) -> str:
    mark = rng.choice(["<|python_tag|>", ""])
    written = (json.dumps({"name": name, "parameters": given}) for name, given in calls)
    return mark + rng.choice([";", "; ", "\n"]).join(written)


def mistral(calls: list[Call], rng: random.Random) -> str:
    if rng.random() < 0.5:
        return f"[TOOL_CALLS] {json.dumps([{'name': name, 'arguments': given} for name, given in calls])}"
    args = rng.choice(["[ARGS]", "", "[CALL_ID]abc123XYZ[ARGS]"])
    return "".join(f"[TOOL_CALLS]{name}{args}{json.dumps(given)}" for name, given in calls)


def qwen3_coder(calls: list[Call], rng: random.Random) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    )


def glm45(calls: list[Call], rng: random.Random) -> str:
    line = rng.choice(["\n", ""])
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{as_text(value)}</arg_value>{line}"
            for key, value in given.items()
        )
        + "</tool_call>"
        for name, given in calls
    )


def pythonic(calls: list[Call], rng: random.Random) -> str:
    mark, end = rng.choice([("<|python_start|>", "<|python_end|>"), ("", "")])
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    return f"{mark}[{rng.choice([',', ', ']).join(written)}]{end}"


def deepseek_v3(calls: list[Call], rng: random.Random) -> str:
    written = (
        f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}{name}\n```json\n{json.dumps(given)}\n```{DEEPSEEK_CALL_END}"
        for name, given in calls
    )
    return DEEPSEEK_CALLS + "\n".join(written) + DEEPSEEK_CALLS_END


def deepseek_v31(calls: list[Call], rng: random.Random) -> str:
    written = (
        f"{DEEPSEEK_CALL}{name}{DEEPSEEK_SEPARATOR}{json.dumps(given)}{DEEPSEEK_CALL_END}" for name, given in calls
    )
    return DEEPSEEK_CALLS + "".join(written) + DEEPSEEK_CALLS_END


def functiongemma(calls: list[Call], rng: random.Random) -> str:
    written = (braced(given, "<escape>") for _, given in calls)
    return "".join(
        f"<start_function_call>call:{name}{text}<end_function_call>"
        for (name, _), text in zip(calls, written, strict=True)
    )


def gemma4(calls: list[Call], rng: random.Random) -> str:
    quote = '<|"|>'
    return "".join(f"<|tool_call>call:{name}{braced(given, quote)}<tool_call|>" for name, given in calls)


def braced(value: object, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{braced(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(braced(item, quote) for item in value)}]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


WRITERS = [
    hermes, llama3, mistral, qwen3_coder, glm45, pythonic, deepseek_v3, deepseek_v31, functiongemma, gemma4,
]  # fmt: skip
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def typed(calls: list[Call]) -> dict[str, dict]:
    """Schemas of calls, in which each argument has a name of its own."""
    properties = {key: {"type": TYPES.get(type(value), "null")} for _, given in calls for key, value in given.items()}
    return {name: {"type": "object", "properties": properties} for name in TOOLS}


@pytest.mark.parametrize("write", WRITERS)
def test_what_is_written_is_read_however_it_is_cut(write):
    rng = random.Random(1)
    for _ in range(200):
        calls = [
            (rng.choice(sorted(TOOLS)), {f"k{index}_{key}": rng.choice(VALUES) for key in range(rng.randrange(3))})
            for index in range(rng.randrange(1, 4))
        ]
        written = write(calls, rng)
        before = "" if written[0] in "{[" else rng.choice(["", "I will look. ", "1 < 2 {\n", "[TOOL] "])
        pieces = cuts(before + written + rng.choice(["", "\n"]), rng)
        text, found = read(write.__name__, pieces, tools=typed(calls))
        assert text == before.rstrip()
        assert [(name, json.loads(given)) for name, given in found] == calls


@pytest.mark.parametrize("form", FORMS)
def test_any_text_is_read_as_if_it_came_at_once(form):
    """Also what is no call, or is broken off."""
    rng = random.Random(1)
    marks = [
        "<tool_call>",
        "```json",
        "```",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "add",
        '{"name": "add", ',
        '"arguments": ',
        "{}",
        '{"name": "add", "parameters": {"a": ',
        "<function=add>",
        "<parameter=a>",
        "<tool_call>add\n",
        "<arg_key>a</arg_key>",
        "<arg_value>",
        "[add(a",
        f"{DEEPSEEK_CALL}add{DEEPSEEK_SEPARATOR}",
        "<start_function_call>call:add{a",
        "<|tool_call>call:add{a",
        "<tool_call|>",
    ]
    for _ in range(400):
        text = "".join(rng.choice(WORDS + marks * 2) for _ in range(rng.randrange(1, 12)))
        whole = read(form, [text])
        assert read(form, list(text)) == read(form, cuts(text, rng)) == whole
        if not whole[1]:
            assert whole[0] == text


CASES = [
    ("hermes", 'Wait.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "Wait.", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": null}', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}', "", [("unknown", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "x": [1 </tool_call> hello '
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ', "x": [1 </tool_call> hello',
        [("f", '{"a": 1}'), ("f", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}, "id": "a1"}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}\n{"name": "f", "arguments": {}}</tool_call>', "",
     [("add", "{}"), ("f", "{}")]),
    ("glm45", '<tool_call>{"name": "add", "arguments": {}}{"name": "f", "arguments": {}}</tool_call>', "",
     [("add", "{}"), ("f", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}}\n</tool_call> done', " done", [("add", '{"a": 1}')]),
    ("hermes", "<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>", []),
    ("hermes", '<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', []),
    ("hermes", '{"name": "add", "arguments": {}}\n</tool_call>', "", [("add", "{}")]),
    ("hermes", '{"name": "add", "arguments": {}}\n{"name": "add", "arguments": {}}', "", [("add", "{}")] * 2),
    ("hermes", '```json\n{"name": "add", "arguments": {}}\n```\nDone', "\nDone", [("add", "{}")]),
    ("hermes", '```json\n{"name": "Bob", "arguments": {}}\n```', '```json\n{"name": "Bob", "arguments": {}}\n```', []),
    ("hermes", "```json\n[1]\n```", "```json\n[1]\n```", []),
    ("hermes", "``", "``", []),
    ("hermes", 'So: {"name": "add", "arguments": {}}', 'So: {"name": "add", "arguments": {}}', []),
    ("hermes", " just text \n", " just text \n", []),
    ("llama3", '{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
    ("llama3", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3", '{"name": "add", "age": 5}', '{"name": "add", "age": 5}', []),
    ("llama3", '{"name": "add", "age": 5, "parameters": {}}', '{"name": "add", "age": 5, "parameters": {}}', []),
    ("llama3", '{"name": "add"}', '{"name": "add"}', []),
    ("llama3", '{"answer": 5} or so', '{"answer": 5} or so', []),
    ("llama3", 'So: <|python_tag|>{"name": "add", "parameters": {}}', "So:", [("add", "{}")]),
    ("llama3", '<|python_tag|>brave.call("x")', '<|python_tag|>brave.call("x")', []),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", "[TOOL_CALLS]no call", "[TOOL_CALLS]no call", []),
    ("mistral", "[TOOL_CALLS]" + "a" * 300 + "{}", "[TOOL_CALLS]" + "a" * 300 + "{}", []),
    ("mistral", '[TOOL_CALLS]add{"a": [1]} done', " done", [("add", '{"a": [1]}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": ""}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"arguments": " ", "name": "add"}</tool_call>', "", [("add", "{}")]),
    ("glm45", "<tool_call>add</tool_call> done", " done", [("add", "{}")]),
    ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "", [("add", '{"a": 1}')]),
    ("pythonic", r'[add(a="\ud83d\ude00")]', "", [("add", '{"a": "😀"}')]),
    ("pythonic", "[ add ( a = 1 ) , add() ]", "", [("add", '{"a": 1}'), ("add", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "written", "text", "calls"), CASES)
def test_a_form(form, written, text, calls):
    assert read(form, [written]) == read(form, list(written)) == (text, calls)


LOOSE = [
    ('{"a": "two\nlines\t"}', '{"a": "two\\nlines\\t"}'),
    ('{"a": [1, 2,],}', '{"a": [1, 2 ] }'),
    ('{\n "a": 1e999, "b": 12345678901234567890\n}', '{\n "a": 1e999, "b": 12345678901234567890\n}'),
]


@pytest.mark.parametrize(("written", "given"), LOOSE)
def test_arguments_are_json_also_where_the_model_writes_less(written, given):
    text = f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>'
    assert read("hermes", [text]) == read("hermes", list(text)) == ("", [("add", given)])
    json.loads(given)


MALFORMED = [
    ("hermes", '<tool_call>{"name": "add", "arguments": "hello"}</tool_call>', "", [("add", "hello")]),
    ("hermes", '<tool_call>{"arguments": "1 apple", "name": "add"}</tool_call>', "", [("add", "1 apple")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call> x', " x", [("add", '{"a": }}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"', "", [("add", '{"a": "</tool_call>"')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call> x', " x", [("add", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "add" "arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>["add"]</tool_call>', None, []),
    ("qwen3_coder", "<tool_call>\n<function=add>\nhello</function></tool_call>", None, []),
    ("qwen3_coder", "<tool_call>add()</tool_call>", None, []),
    ("glm45", "<tool_call>add me\n</tool_call>", None, []),
    ("glm45", "<tool_call>add\nme</tool_call>", None, []),
    ("pythonic", "[add(1, 2)]", None, []),
    ("pythonic", "[add(a=b)]", None, []),
    ("pythonic", r'[add(a="\ud83d")]', None, []),
    ("pythonic", "[subtract(a=1)]", None, []),
    ("pythonic", "[1] says so.", None, []),
    ("deepseek_v31", f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}add{DEEPSEEK_SEPARATOR}none{DEEPSEEK_CALL_END}", None, []),
    ("functiongemma", "<start_function_call>call:add{a:}<end_function_call>", None, []),
    ("functiongemma", "<start_function_call>add{a:1}<end_function_call>", None, []),
    ("gemma4", '<|tool_call>call:add{a:<|"|>b}<tool_call|>', None, []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "written", "text", "calls"), MALFORMED)
def test_a_malformed_call_is_text_or_not_whole(form, written, text, calls):
    """What has been passed on as a call stays one."""
    expected = (written if text is None else text), calls
    assert read(form, [written]) == read(form, list(written)) == expected
    reader = CallReader(FORMS[form].read, TOOLS, lambda: "id")
    reader.push(written)
    reader.finish()
    assert reader.whole == (not calls)


CUT = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "b c', [("add", '{"a": "b c')]),
    ("qwen3_coder", "<function=get_weather>\n<parameter=city>\nParis, ", [("get_weather", '{"city": "Paris, ')]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<para", [("add", '{"a": 1')]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1", [("add", "")]),
    ("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key><arg_value>Par", [("get_weather", '{"city": "Par')]),
    ("glm45", "<tool_call>add\n<arg_key>a</arg_key>", [("add", "")]),
    ("pythonic", "[add(a=1), add(a='x", [("add", '{"a": 1}'), ("add", "")]),
    ("functiongemma", "<start_function_call>call:add{a:<escape>x", [("add", '{"a":"x')]),
    ("deepseek_v31", f'{DEEPSEEK_CALLS}{DEEPSEEK_CALL}add{DEEPSEEK_SEPARATOR}{{"a": [', [("add", '{"a": [')]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "written", "calls"), CUT)
def test_a_call_that_is_cut_is_not_whole(form, written, calls):
    assert read(form, [written]) == read(form, list(written)) == ("", calls)
    reader = CallReader(FORMS[form].read, TOOLS, lambda: "id")
    reader.push(written)
    reader.finish()
    assert reader.calls
    assert not reader.whole


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "functiongemma", "gemma4"])
def test_forms_without_json_have_forced_calls_in_that_of_hermes(form):
    calls: list[Call] = [("add", {"a": 1}), ("get_weather", {})]
    assert FORMS[form].grammar is FORMS["hermes"].grammar
    assert read(form, [hermes(calls, random.Random(1))]) == ("", [("add", '{"a": 1}'), ("get_weather", "{}")])


def test_python_has_forced_calls_in_the_form_of_llama():
    assert FORMS["pythonic"].grammar is FORMS["llama3"].grammar
    assert read("pythonic", ['{"name": "add", "parameters": {"a": 1}}']) == ("", [("add", '{"a": 1}')])


TEXTS = [
    ("add", "1", 1), ("add", " true", True), ("add", "None", None), ("add", "a b", "a b"),
    ("add", '{"b": [1]}', {"b": [1]}),
    ("add", "1e999", 1.7976931348623157e308), ("add", "", ""), ("city", "1", "1"), ("city", "null", "null"),
    ("day", "null", None), ("day", "None", None), ("day", "5", "5"), ("day", "Monday", "Monday"),
    ("day", "NaN", "NaN"), ("add", "Infinity", "Infinity"), ("add", '{"a": 1,}', {"a": 1}),
    ("add", "{'a': 1}", "{'a': 1}"), ("place", "{'a': True}", {"a": True}), ("place", "{'a': b}", "{'a': b}"),
    ("name", "5", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text", "value"), TEXTS)
def test_values_between_tags_are_what_the_schema_says(key, text, value):
    name = "add" if key == "add" else "get_weather"
    for form, written in (
        ("qwen3_coder", f"<tool_call><function={name}><parameter={key}>\n{text}\n</parameter></function></tool_call>"),
        ("glm45", f"<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"),
    ):
        ((_, arguments),) = read(form, [written])[1]
        assert json.loads(arguments) == {key: value}


def test_a_forced_call_that_is_cut_before_its_name_is_no_text():
    for written in ('<tool_call>\n{"na', "<tool_call>\n", '<tool_call>\n{"name": "add", "argum'):
        assert read("hermes", [written], only_calls=True) == read("hermes", list(written), only_calls=True) == ("", [])
    assert read("llama3", ['{"name": "a'], only_calls=True) == ("", [])


def test_one_call_is_enough_where_calls_are_not_parallel():
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read("hermes", list(f"A{call}B{call}C"), most=1) == ("A", [("add", "{}")])


def test_what_comes_after_the_last_call_is_not_kept():
    reader = CallReader(FORMS["hermes"].read, TOOLS, lambda: "id", most=1)
    reader.push('<tool_call>{"name": "add", "arguments": {}')
    assert not reader.enough
    assert reader.push("}") == []
    assert reader.enough
    assert [reader.push("text ") for _ in range(3)] == [[]] * 3
    assert reader._text == ""
    cut = CallReader(FORMS["hermes"].read, TOOLS, lambda: "id", most=1)
    cut.push('<tool_call>{"name": "add", "arguments": {"a')
    cut.finish()
    assert not cut.enough


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_a_call_that_a_stop_word_cut_is_no_whole_call(form):
    """With `stop: ["}"]`, as clients send it that read code."""
    choice = Choice(CallReader(FORMS[form].read, TOOLS, lambda: "id"))
    cut = {"hermes": '<tool_call>{"name": "add", "arguments": {"a": 1', "qwen3_coder": "<function=add><parameter=a>1"}
    choice.add(Chunk(id="a", text=cut[form], done=True, finish_reason="stop"))
    assert (len(choice.calls), choice.finish_reason) == (1, "stop")


@pytest.mark.parametrize(("written", "reason"), [("}", "tool_calls"), ("", "length")])
def test_an_answer_that_is_cut_after_its_last_call_calls_tools(written, reason):
    choice = Choice(CallReader(FORMS["hermes"].read, TOOLS, lambda: "id", most=1))
    choice.add(Chunk(id="a", text='<tool_call>{"name": "add", "arguments": {}' + written))
    choice.add(Chunk(id="a", text="", done=True, finish_reason="length"))
    assert choice.finish_reason == reason


def test_pieces_come_as_soon_as_they_are_certain():
    reader = CallReader(FORMS["hermes"].read, TOOLS, lambda: "id")
    assert reader.push("So <tool_") == ["So"]
    assert reader.push("box> <tool_call>") == [" <tool_box>"]
    assert reader.push('{"name": "add", "arguments": ') == [CallPart(0, "", "id", "add")]
    assert reader.push('{"a": "b') == [CallPart(0, '{"a": "b')]
    assert reader.push('c"}') == [CallPart(0, 'c"}')]
    assert reader.push("}") == []
    assert reader.finish() == []


def test_long_arguments_take_linear_time():
    """Two megabytes in pieces of four characters: looking at all of them again for each would take hours."""
    reader = CallReader(FORMS["hermes"].read, TOOLS, lambda: "id")
    reader.push('<tool_call>{"name": "add", "arguments": {"a": "')
    pieces = [reader.push("abcd")[0].arguments for _ in range(100_000)]
    assert pieces[-1] == "abcd"
    assert len(reader.push("x" * 2_000_000)[0].arguments) == 2_000_000


@pytest.mark.parametrize(
    ("form", "start", "again"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": bad "', "</tool_call>"),
        ("pythonic", "[add(a=", "f()"),
        ("pythonic", '[add(a="', ")"),
        ("gemma4", "<|tool_call>call:add{a:", '<|"|>'),
    ],
)
def test_hostile_answers_take_little_time(form, start, again):
    with at_most(3):
        read(form, [start, *[again] * 8000])
