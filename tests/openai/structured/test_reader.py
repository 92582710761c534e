"""Answers read piece by piece: text and calls in each form, however they are cut."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from redraft.openai.answers.choices import Choice
from redraft.openai.structured.forms import FORMS
from redraft.openai.structured.reader import CallPart, CallReader
from redraft.worker.protocol import Chunk

TOOLS = {"add", "get_weather"}
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
]

Call = tuple[str, dict]


def read(form: str, pieces: list[str], most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer, and each call's name and arguments."""
    numbers = itertools.count()
    reader = CallReader(FORMS[form].read, TOOLS, lambda: f"c{next(numbers)}", most)
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


@pytest.mark.parametrize("write", [hermes, llama3, mistral])
def test_what_is_written_is_read_however_it_is_cut(write):
    rng = random.Random(1)
    for _ in range(200):
        calls = [
            (rng.choice(sorted(TOOLS)), {f"k{key}": rng.choice(VALUES) for key in range(rng.randrange(3))})
            for _ in range(rng.randrange(1, 4))
        ]
        written = write(calls, rng)
        before = "" if written.startswith("{") else rng.choice(["", "I will look. ", "1 < 2 {\n", "[TOOL] "])
        text, found = read(write.__name__, cuts(before + written + rng.choice(["", "\n"]), rng))
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
    ]
    for _ in range(200):
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
]  # fmt: skip


@pytest.mark.parametrize(("form", "written", "text", "calls"), CASES)
def test_a_form(form, written, text, calls):
    assert read(form, [written]) == read(form, list(written)) == (text, calls)


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
