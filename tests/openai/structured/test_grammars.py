"""The grammars of calls: what the library admits by them is what the forms read, and nothing else is admitted."""

from __future__ import annotations

import json

import pytest

from redraft.grammar.library import compiled, grammar_tokens, library_grammar
from redraft.openai.structured.forms import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
    FORMS,
)
from redraft.openai.structured.reader import CallReader
from redraft.openai.structured.tools import Function
from redraft.request import Guide
from redraft.text import TextCodec
from tests.toy_engine import toy_tokenizer

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
MOVE = Function(
    name="move",
    parameters={
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/point"}, "const": {"$ref": "#/$defs/point"}},
        "required": ["to"],
        "additionalProperties": False,
        "$defs": {"point": POINT},
    },
)
STOP = Function(name="stop.now")
FUNCTIONS = [MOVE, STOP]
ADDED = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")


def codec(special: tuple[str, ...]) -> TextCodec:
    tokenizer = toy_tokenizer(257)
    tokenizer.add_special_tokens(list(special))
    return TextCodec(tokenizer)


class Admitted:
    """Which texts a guide admits, in a vocabulary."""

    def __init__(self, guide: Guide, words: TextCodec, vocab_size: int):
        self._words = words
        self._matcher = compiled(grammar_tokens(words, vocab_size), library_grammar(guide))

    def __contains__(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        ids = self._words.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def arguments(name: str) -> str:
    return {"move": '{"to": {"x": 1}}', "stop.now": "{}"}[name]


def hermes(*names: str) -> str:
    written = (f'{{"name": "{name}", "arguments": {arguments(name)}}}' for name in names)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


def llama3(*names: str) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {arguments(name)}}}' for name in names)


def mistral(*names: str) -> str:
    written = (f'{{"name": "{name}", "arguments": {arguments(name)}}}' for name in names)
    return f"[TOOL_CALLS][{', '.join(written)}]"


def mistral_args(*names: str) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments(name)}" for name in names)


def deepseek_v3(*names: str) -> str:
    written = (
        f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}{name}\n```json\n{arguments(name)}\n```{DEEPSEEK_CALL_END}"
        for name in names
    )
    return DEEPSEEK_CALLS + "\n".join(written) + DEEPSEEK_CALLS_END


def deepseek_v31(*names: str) -> str:
    written = (f"{DEEPSEEK_CALL}{name}{DEEPSEEK_SEPARATOR}{arguments(name)}{DEEPSEEK_CALL_END}" for name in names)
    return DEEPSEEK_CALLS + "".join(written) + DEEPSEEK_CALLS_END


@pytest.mark.parametrize(
    ("write", "special", "most"),
    [
        (hermes, (), 3), (llama3, ADDED, 1), (mistral, (), 3), (mistral, ("[TOOL_CALLS]",), 3),
        (mistral_args, ADDED, 1), (deepseek_v3, (), 3), (deepseek_v31, (), 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("several", [True, False])
def test_what_is_admitted_is_read(write, special, most, several):
    form, words = FORMS[write.__name__.removesuffix("_args")], codec(special)
    grammar = form.grammar(FUNCTIONS, several, words)
    opening, size = "".join(grammar.opening), 257 + len(special)
    forced = Admitted(grammar.after_opening(), words, size)
    either = Admitted(grammar.or_json("f", Guide(kind="json_schema", text=json.dumps(POINT)), words), words, size)
    assert '{"x": 5}' in either
    assert '{"y": 5}' not in either
    for names in (["move"], ["stop.now"], ["stop.now", "move"], ["move", "move", "move"]):
        text = write(*names)
        assert text.startswith(opening)
        admitted = len(names) <= (most if several else 1)
        assert (text.removeprefix(opening) in forced) == (text in either) == admitted, text
        reader = CallReader(form.read, {"move": {}, "stop.now": {}}, lambda: "id")
        parts = reader.push(text) + reader.finish()
        assert [part.name for part in parts if part.name is not None] == names
        assert "".join(part.arguments for part in parts) == "".join(map(arguments, names))
    changes = ('"x": 1', '"x": "1"'), ("move", "more"), ('{"x"', '{"y"'), ('"to"', '"from"'), ("1}}", '1}, "z": 1}')
    wrong = {write("move").replace(*change) for change in changes} - {write("move")} | {write()}
    for text in wrong:
        assert text.removeprefix(opening) not in forced, text
        assert text not in either, text


def test_one_function_may_be_the_only_one():
    words = codec(())
    grammar = FORMS["hermes"].grammar([STOP], True, words)
    forced, opening = Admitted(grammar.after_opening(), words, 257), "".join(grammar.opening)
    assert hermes("stop.now").removeprefix(opening) in forced
    assert hermes("move").removeprefix(opening) not in forced


def test_references_follow_their_schema():
    """Within properties called like keywords too, and not within values."""
    words = codec(())
    odd = MOVE.model_copy(update={"parameters": MOVE.parameters | {"examples": [{"$ref": "#/x"}], "$schema": "s"}})
    grammar = FORMS["llama3"].grammar([odd], True, words)
    forced = Admitted(grammar.after_opening(), words, 257)
    assert '{"name": "move", "parameters": {"to": {"x": 1}, "const": {"x": 2}}}' in forced
    assert '{"name": "move", "parameters": {"to": {"x": 1}, "const": {"x": "2"}}}' not in forced
    assert '"$ref": "#/x"' in grammar.rules
