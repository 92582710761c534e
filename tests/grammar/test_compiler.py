"""Guides that cannot be used are refused soon, each with a reason, whatever they do to the process that tries them."""

from __future__ import annotations

import json
import signal
import threading

import pytest

from redraft.grammar import compiler, trial
from redraft.grammar.compiler import Grammars
from redraft.grammar.trial import TakesLonger
from redraft.request import MAX_GUIDE_CHARACTERS, Guide, InvalidRequest
from tests.conftest import waits_at_most
from tests.grammar.tokens import CODEC, GRAMMARS, GUIDES, VOCAB, pair_codec


def nested(before: str, inner: str, after: str, times: int) -> str:
    return before * times + inner + after * times


DOUBLED = ["start: A0", *(f"A{i}: A{i + 1} A{i + 1}" for i in range(30)), 'A30: "a"']
CHAIN = ["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(9000)), 'r9000 ::= "a"']
REFUSED = {
    "no JSON": ("json_schema", "{"),
    "a schema that nothing meets": ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 2}'),
    "a keyword that is not known how to meet": ("json_schema", '{"not": {"pattern": "x"}}'),
    "deep objects": ("json_schema", nested('{"properties":{"a":', "{}", "}}", 9000)),
    "deep groups": ("regex", nested("(", "a", ")", 50_000)),
    "deep parentheses": ("grammar", "start: " + nested("(", '"a"', ")", 50_000)),
    "doubled thirty times": ("grammar", "\n".join(DOUBLED)),
    "many texts at once": ("grammar", "start: R\nR: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(2, 30))),
    "a multiple of a large number": ("json_schema", '{"type": "integer", "multipleOf": 123456789}'),
    "rules in a long chain": ("grammar", "\n".join(CHAIN)),
}  # fmt: skip

WRONG = {
    "an unknown rule": ("grammar", 'root ::= "a" other', "'other' not found"),
    "an open parenthesis": ("grammar", 'root ::= ("a"', r"Expected '\)'"),
    "an open string": ("grammar", 'root ::= "a', "end of input"),
    "an escape that is cut": ("grammar", 'root ::= "a\\', "ends within an escape"),
    "no grammar of either form": ("grammar", "\0\1", "lexer error"),
    "left recursion without an end": ("grammar", 'root ::= root "a"', "no text meets it"),
    "left recursion without an end, Lark": ("grammar", 'start: start "a"', "no text meets it"),
    "an unknown rule, Lark": ("grammar", "start: other", 'unknown name: "other"'),
    "a terminal of itself": ("grammar", 'start: A\nA: "a" A | "b"', "circular reference"),
    "a schema of nothing but itself": ("json_schema", '{"$ref": "#"}', "no text meets it"),
    "a reference to nothing": ("json_schema", '{"$ref": "#/$defs/a"}', "expected a reference within the schema"),
    "an open group": ("regex", "(a", "unclosed group"),
    "a reference back": ("regex", r"(a)\1", "backreferences are not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_and_ends_no_process(name):
    kind, text, said = WRONG[name]
    GRAMMARS.compile(Guide(kind="choice", text=json.dumps([name])))
    process = GRAMMARS._trial._process
    with pytest.raises(InvalidRequest, match=said) as refusal:
        GRAMMARS.compile(Guide(kind=kind, text=text))
    assert GRAMMARS._trial._process is process
    assert process.poll() is None
    assert "non-verbose" not in str(refusal.value)


def test_recursion_and_repetition_that_have_an_end_are_served():
    for text in (
        'root ::= root "a" | "b"',
        'root ::= "a"{1,100000000}',
        'start: start "a" | "b"',
        'start: "a"{1,1000000}',
    ):
        assert GRAMMARS.compile(Guide(kind="grammar", text=text)).start().mask().any()
    assert GRAMMARS.compile(Guide(kind="choice", text=json.dumps(["a\x7f"]))).start().mask().any()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_soon(name, monkeypatch):
    kind, text = REFUSED[name]
    GRAMMARS.compile(Guide(kind="choice", text=json.dumps([name])))  # the process has started
    monkeypatch.setattr(trial, "COMPILE_S", 1.0)
    monkeypatch.setattr(trial, "PATIENCE_S", 5.0)
    refused = pytest.raises(InvalidRequest, match=f"^guide.text: the {kind} cannot be used: .{{8,}}")
    with waits_at_most(10), refused as refusal:
        GRAMMARS.compile(Guide(kind=kind, text=text))
    assert len(str(refusal.value)) < 600
    assert "\n" not in str(refusal.value)


def test_the_next_guide_is_compiled_after_one_that_took_too_long(monkeypatch):
    grammars = Grammars(CODEC, VOCAB)
    grammars.compile(GUIDES["choice"])
    with monkeypatch.context() as patch:
        patch.setattr(trial, "COMPILE_S", 0.1)
        patch.setattr(trial, "PATIENCE_S", 0.1)
        grammars._trial._process.send_signal(signal.SIGSTOP)
        with pytest.raises(InvalidRequest, match=r"more than 0\.1 s to compile"):
            grammars.compile(GUIDES["schema"])
    assert grammars.cached(GUIDES["schema"]) is None
    assert grammars.compile(GUIDES["schema"]).start().forced()


LONG = Guide(kind="json_schema", text='{"type": "integer", "multipleOf": 123456789}')


def test_a_guide_that_takes_long_delays_no_other_and_ends_no_process(monkeypatch):
    grammars = Grammars(CODEC, VOCAB)
    grammars.compile(GUIDES["choice"])
    monkeypatch.setattr(trial, "COMPILE_S", 1.0)
    process, ended = grammars._trial._process, list[str]()

    def compile_long() -> None:
        with pytest.raises(InvalidRequest, match="more than 1 s to compile"):
            grammars.compile(LONG)
        ended.append("long")

    long = threading.Thread(target=compile_long)
    long.start()
    grammars.compile(GUIDES["schema"])
    ended.append("schema")
    long.join()
    assert ended == ["schema", "long"]
    with pytest.raises(TakesLonger, match=r"more than 0\.05 s"):
        grammars.compile(LONG, 0.05)
    assert grammars._trial._process is process
    assert grammars.compile(GUIDES["regex"]).start().mask().any()


def test_a_process_that_somebody_ended_is_replaced():
    grammars = Grammars(CODEC, VOCAB)
    grammars.compile(GUIDES["choice"])
    grammars._trial._process.kill()
    grammars._trial._process.wait()
    assert grammars.compile(GUIDES["schema"]).start().forced()


def test_a_process_that_ends_before_it_is_ready_is_replaced():
    grammars = Grammars(CODEC, VOCAB)
    process = grammars._trial._process
    process.kill()
    assert grammars.compile(GUIDES["choice"]).start().mask().any()
    assert grammars._trial._process is not process
    assert grammars.compile(GUIDES["schema"]).start().forced()


def test_a_grammar_that_has_failed_is_compiled_anew():
    grammars = Grammars(CODEC, VOCAB)
    first = grammars.compile(GUIDES["json"])
    first.failed = True
    assert grammars.cached(GUIDES["json"]) is None
    assert grammars.compile(GUIDES["json"]) is not first


def test_the_last_used_guides_are_kept(monkeypatch):
    monkeypatch.setattr(compiler, "KEPT", 3)
    grammars = Grammars(CODEC, VOCAB)
    numbered = [Guide(kind="choice", text=json.dumps([f"a{number}"])) for number in range(3)]
    first = grammars.compile(GUIDES["json"])
    for guide in numbered:
        grammars.compile(guide)
        assert grammars.compile(GUIDES["json"]) is grammars.cached(GUIDES["json"]) is first
    assert [grammars.cached(guide) is not None for guide in numbered] == [False, True, True]


def test_a_schema_may_have_another_form():
    """By default JSON is on one line, without a choice of white space."""
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    for own, text in (({}, "[1, 1]"), ({"x-guidance": {"whitespace_flexible": False, "item_separator": ","}}, "[1,1]")):
        grammar = GRAMMARS.compile(Guide(kind="json_schema", text=json.dumps(schema | own)))
        assert CODEC.decode(grammar.start().forced()) == text


def test_a_long_forced_text_is_encoded_in_parts():
    """Of hundreds of thousands of characters the tokenizer sees the next ones only."""
    encoded = []
    codec = pair_codec()
    codec.encode_part = lambda text: encoded.append(len(text)) or CODEC.encode_part(text)
    state = Grammars(codec, VOCAB).compile(Guide(kind="choice", text=json.dumps(["n", "a" * 200_000]))).start()
    forced = state.forced(tuple(CODEC.encode_part("a")))
    assert set(CODEC.decode(forced)) == {"a"}
    assert max(encoded) == 1000


def test_the_largest_choice_compiles():
    texts = [f'{number:05} é\U0001f600\\"\n' + "x" * 180 for number in range(1024)]
    guide = Guide(kind="choice", text=json.dumps(texts, ensure_ascii=False))
    assert len(guide.text) > 0.7 * MAX_GUIDE_CHARACTERS
    assert GRAMMARS.compile(guide).start().forced()
