"""Thoughts apart from answers: as the reader tells them, and in chat completions and responses."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from redraft.grammar.library import compiled, grammar_tokens, library_grammar
from redraft.openai.model import ServedModel
from redraft.openai.schemas import ChatBody
from redraft.openai.structured.thoughts import MARKS, NO_THOUGHTS, Thinking, ThoughtReader, marks_of, thinking_after
from redraft.openai.translate import chat_job
from redraft.request import Guide
from redraft.serving.settings import ReasoningParser, ServeSettings
from redraft.text import TextCodec
from tests.openai.parrot_worker import PARROT_LIMITS, PARROT_TEMPLATE, VOCABULARY
from tests.openai.serving import MODEL, FrontEnd, front_end, toy_bundle
from tests.openai.structured.test_reader import cuts
from tests.openai.structured.test_tools import ADD, asking, called, calls_of
from tests.toy_engine import toy_tokenizer

THINK = MARKS["think"]
THINKING_TEMPLATE = PARROT_TEMPLATE + "{# </think> #}"
CODEC = TextCodec(toy_tokenizer(VOCABULARY))


def read(pieces: list[str], begun: bool = False) -> tuple[str, str]:
    reader = ThoughtReader(Thinking(CODEC, THINK, begun, True))
    parts = [reader.push(piece) for piece in pieces] + [reader.push("", ended=True)]
    thoughts, answers = zip(*parts, strict=True)
    return "".join(thoughts), "".join(answers)


CASES = [
    ("<think>\nHm, <b>.\n\nSo.\n</think>\n\nYes. ", False, ("Hm, <b>.\n\nSo.", "Yes. ")),
    ("\n<think></think>Yes", False, ("", "Yes")),
    (" Yes <think>no</think>", False, ("", " Yes <think>no</think>")),
    ("<think>Hm", False, ("Hm", "")),
    ("<think>Hm</thi", False, ("Hm</thi", "")),
    ("<thin", False, ("", "<thin")),
    ("  ", False, ("", "  ")),
    ("Hm\n</think>\n\nYes", True, ("Hm", "Yes")),
    ("<think>Hm</think>Yes </think>", True, ("Hm", "Yes </think>")),
    ("Hm", True, ("Hm", "")),
]


@pytest.mark.parametrize(("text", "begun", "expected"), CASES)
def test_thoughts_are_told_from_the_answer_however_it_is_cut(text, begun, expected):
    rng = random.Random(1)
    for pieces in ([text], list(text), cuts(text, rng), cuts(text, rng)):
        assert read(pieces, begun) == expected


def test_thoughts_come_as_they_arrive():
    reader = ThoughtReader(Thinking(CODEC, THINK, False, True))
    assert [reader.push(piece) for piece in ("<thi", "nk>So ", "it is", "</think> a", "b")] == [
        ("", ""), ("So", ""), (" it is", ""), ("", "a"), ("", "b"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>\n\n</think>\n\n", None),
        ("</think>", None),
        ("say <think>", True),
        ("</think>?", False),
    ],
)
def test_the_end_of_the_prompt_says_whether_thoughts_have_begun(prompt, begun):
    thinking = thinking_after(prompt, CODEC, THINK, False)
    assert (None if thinking is None else thinking.begun) == begun


@pytest.mark.parametrize(
    ("content", "begun"),
    [
        ("", False),
        ("<think>\nFirst, ", True),
        ([{"type": "text", "text": "<think>a</think>b<think>c"}], True),
        ("<think>a</think>b", None),
        ("Sure, ", None),
    ],
)
def test_a_continued_message_says_whether_thoughts_have_begun(content, begun, tmp_path):
    body = {"messages": [{"role": "assistant", "content": content}], "continue_final_message": True}
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = served(tmp_path, f"Q:{template}{{# </think> #}}")
    (prompt,) = chat_job(ChatBody.model_validate(body), model).prompts
    assert (prompt.thinking and prompt.thinking.begun) is begun


def test_marks_are_those_of_the_template_or_the_vocabulary():
    assert marks_of("... </think> ...", CODEC) is THINK
    assert marks_of("[/THINK]", CODEC) is MARKS["mistral"]
    assert marks_of("", CODEC) is None
    tokenizer = toy_tokenizer(VOCABULARY)
    tokenizer.add_tokens(["<think>", "</think>"])
    assert marks_of("", TextCodec(tokenizer)) is THINK


def test_the_marks_are_those_of_the_command_line():
    assert [*MARKS, NO_THOUGHTS] == list(ReasoningParser)


@pytest.mark.parametrize("marks", MARKS.values())
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_guide_begins_after_thoughts(marks, special, begun):
    tokenizer = toy_tokenizer(VOCABULARY)
    if special:
        tokenizer.add_special_tokens([marks.begin, marks.end])
    codec = TextCodec(tokenizer)
    before = Thinking(codec, marks, begun, True).grammar()
    tokens = grammar_tokens(codec, VOCABULARY + 2 * special)
    guides = [
        (Guide(kind="json"), '{"a": 1}'),
        (Guide(kind="json_schema", text='{"const": 1}'), "1"),
        (Guide(kind="regex", text="a/b+"), "a/bb"),
        (Guide(kind="choice", text='["yes", "no"]'), "no"),
        (Guide(kind="grammar", text='start: before\nbefore: "x" "y"'), "xy"),
    ]
    for guide, text in guides:
        matcher = compiled(tokens, library_grammar(guide.model_copy(update={"before": before})))

        def admits(answer: str, matcher=matcher) -> bool:
            ids = codec.encode(answer)
            copy = matcher.deep_copy()
            return copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()

        opening = "" if begun else marks.begin
        assert admits(f"{opening}\nwhat, {{ {text}?\n{marks.end}\n\n{text}")
        assert admits(f"{opening}{marks.end}{text}")
        assert admits(text) is not begun
        assert not admits(f"{opening}hm{marks.end}\n\nelse")
        assert not admits(f"{opening}hm")


def served(tmp_path: Path, template: str, parser: str | None = None) -> ServedModel:
    bundle = toy_bundle(tmp_path, template, VOCABULARY, PARROT_LIMITS.max_len)
    return ServedModel(bundle, ServeSettings(reasoning_parser=parser))


def test_the_option_settles_the_marks(tmp_path):
    def thinking(template: str, parser: str | None) -> Thinking | None:
        return served(tmp_path, template, parser).thinking_after("<assistant>")

    assert thinking(THINKING_TEMPLATE, "none") is None
    for template, parser, marks, expected in (
        (PARROT_TEMPLATE, None, THINK, False),
        (PARROT_TEMPLATE, "mistral", MARKS["mistral"], True),
        (THINKING_TEMPLATE, None, THINK, True),
        (THINKING_TEMPLATE, "seed_oss", MARKS["seed_oss"], True),
    ):
        found = thinking(template, parser)
        assert (found.marks, found.begun, found.expected) == (marks, False, expected)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    bundle = toy_bundle(tmp_path_factory.mktemp("thinker"), THINKING_TEMPLATE, VOCABULARY, PARROT_LIMITS.max_len)
    with (
        tempfile.TemporaryDirectory(prefix="redraft-test-") as folder,
        front_end(Path(folder), bundle, worker="tests/openai/parrot_worker.py") as running,
    ):
        yield running


LOG_PROBS = "message.output_text.logprobs"
THOUGHT = f"<think>\nI could {called('add', a=1, b=2)} or not.\n</think>\n\n"


def test_thoughts_are_a_field_of_their_own(thinker):
    answer = thinker.client().chat.completions.create(**asking(f"{THOUGHT}Hello "))
    message = answer.choices[0].message
    assert message.content == "Hello "
    assert message.reasoning_content == THOUGHT.split("\n\n")[0][8:-9]
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    plain = thinker.client().chat.completions.create(**asking("Hello "))
    assert (plain.choices[0].message.content, plain.usage.completion_tokens_details) == ("Hello ", None)
    assert not hasattr(plain.choices[0].message, "reasoning_content")


def test_thoughts_are_left_out_on_request(thinker):
    asked = asking(f"{THOUGHT}Hello ", extra_body={"include_reasoning": False})
    message = thinker.client().chat.completions.create(**asked).choices[0].message
    assert (message.content, hasattr(message, "reasoning_content")) == ("Hello ", False)
    deltas = [event.choices[0].delta for event in thinker.client().chat.completions.create(**asked, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "Hello "
    assert not any(hasattr(delta, "reasoning_content") for delta in deltas)


def test_thoughts_that_are_cut_are_no_answer(thinker):
    (choice,) = thinker.client().chat.completions.create(**asking(THOUGHT, max_tokens=20)).choices
    assert (choice.message.content, choice.finish_reason) == (None, "length")
    assert choice.message.reasoning_content == "I could <too"


def test_a_stream_has_thoughts_first(thinker):
    asked = asking(f"{THOUGHT}Hello {called('add', a=1, b=2)}", ADD)
    whole = thinker.client().chat.completions.create(**asked).choices[0].message
    deltas = [event.choices[0].delta for event in thinker.client().chat.completions.create(**asked, stream=True)]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == whole.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == whole.content == "Hello"
    assert sum(map(bool, thoughts)) > 5
    first = next(index for index, delta in enumerate(deltas) if delta.content)
    assert not any(thoughts[first:])


def test_a_call_within_thoughts_is_none(thinker, parrot):
    """Also where nothing says that the model thinks."""
    for server in (thinker, parrot):
        (choice,) = server.client().chat.completions.create(**asking(f"{THOUGHT}No.", ADD)).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("No.", None, "stop")
        (choice,) = server.client().chat.completions.create(**asking(THOUGHT + called("add", a=3, b=4), ADD)).choices
        assert (calls_of(choice.message), choice.message.content) == ([("add", {"a": 3, "b": 4})], None)


def test_formats_and_forced_calls_begin_after_thoughts(thinker):
    def ask(text: str, *tools: dict, **fields):
        (choice,) = thinker.client().chat.completions.create(**asking(THOUGHT + text, *tools, **fields)).choices
        assert choice.message.reasoning_content.startswith("I could")
        return choice.message

    assert ask('{"a": 1}', response_format={"type": "json_object"}).content == '{"a": 1}'
    assert ask("no", extra_body={"guided_choice": ["yes", "no"]}).content == "no"
    for tool_choice in ("required", {"type": "function", "function": {"name": "add"}}):
        fields = {"tool_choice": tool_choice, "parallel_tool_calls": False}
        message = ask(called("add", a=3, b=4), ADD, **fields)
        assert (calls_of(message), message.content) == ([("add", {"a": 3, "b": 4})], None)
    message = ask(called("add", a=3, b=4), ADD, response_format={"type": "json_object"})
    assert calls_of(message) == [("add", {"a": 3, "b": 4})]


def test_an_answer_without_thoughts_may_be_in_a_format_too(thinker):
    asked = asking('{"a": 1}', response_format={"type": "json_object"})
    assert thinker.client().chat.completions.create(**asked).choices[0].message.content == '{"a": 1}'


def test_responses_have_reasoning_items(thinker):
    client = thinker.client()
    asked = {"model": MODEL, "input": f"{THOUGHT}Hello", "temperature": 0}
    answer = client.responses.create(**asked)
    reasoning, message = answer.output
    assert (reasoning.type, reasoning.summary, reasoning.status) == ("reasoning", [], "completed")
    assert reasoning.content[0].text.startswith("I could")
    assert (answer.output_text, message.type) == ("Hello", "message")
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    events = list(client.responses.create(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == reasoning.content[0].text
    assert len(deltas) > 5
    dones = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in dones] == ["reasoning", "message"]
    assert events[-1].response.output == dones


def test_log_probabilities_are_not_those_of_thoughts(thinker):
    asked = {"model": MODEL, "input": f"{THOUGHT}Hello", "temperature": 0, "include": [LOG_PROBS]}
    answer = thinker.client().responses.create(**asked)
    assert "".join(entry.token for entry in answer.output[1].content[0].logprobs) == "Hello"


def test_thoughts_go_back(tmp_path, thinker):
    """The template says where they go."""
    client = thinker.client()
    items: list = [{"role": "user", "content": f"{THOUGHT}Hello"}]
    items += [item.to_dict() for item in client.responses.create(model=MODEL, input=items, temperature=0).output]
    assert (
        client.responses.create(
            model=MODEL, input=[*items, {"role": "user", "content": "B"}], temperature=0
        ).output_text
        == "B"
    )
    source = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    model = served(tmp_path, source)
    message = {"role": "assistant", "content": "a", "reasoning": "hm"}
    assert model.chat_text([{"role": "user", "content": "q"}, message], []) == "<user>|q<assistant>hm|a"
