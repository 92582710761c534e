"""The grammars of calls: what the library admits by them is what the forms read, and nothing else is admitted."""

from __future__ import annotations

import json

import pytest

from redraft.grammar.library import compiled, grammar_tokens, library_grammar
from redraft.openai.errors import ApiError
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
from tests.conftest import at_most
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
    named = {"type": "object", "properties": {"$ref": {"const": {"$ref": "#/x"}}, "at": {"$ref": "#spot"}}}
    odd = MOVE.model_copy(
        update={
            "parameters": MOVE.parameters
            | {"$schema": "s", "$defs": {"point": POINT, "named": named | {"additionalProperties": False}}}
            | {"properties": MOVE.parameters["properties"] | {"named": {"$ref": "#/$defs/named"}}}
        }
    )
    odd.parameters["$defs"]["spot"] = {"$anchor": "spot"} | POINT
    grammar = FORMS["llama3"].grammar([odd], True, words)
    forced = Admitted(grammar.after_opening(), words, 257)
    call = '{"name": "move", "parameters": {"to": {"x": 1}, "const": {"x": 2}, "named": %s}}'
    assert call % '{"$ref": {"$ref": "#/x"}, "at": {"x": 1}}' in forced
    assert call % '{"$ref": {"$ref": "#/x"}, "at": {"x": "1"}}' not in forced
    assert call % '{"$ref": {"$ref": "#/y"}}' not in forced
    assert call.replace('"x": 2', '"x": "2"') % "{}" not in forced


def arguments_of(parameters: dict | None, **options) -> Admitted:
    """The calls of a function `f` by its parameters."""
    words = codec(())
    functions = [Function(name="f", parameters=parameters, **options), STOP]
    return Admitted(FORMS["llama3"].grammar(functions, False, words).after_opening(), words, 257)


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "object"}, {"type": "object", "properties": {}}, {"type": ["object"], "title": "None"},
     {"type": "object", "properties": {}, "required": []} | {"$schema": "http://json-schema.org/draft-07/schema#"}],
)  # fmt: skip
def test_a_function_without_parameters_gets_none(parameters):
    calls = arguments_of(parameters)
    assert '{"name": "f", "parameters": {}}' in calls
    assert '{"name": "f", "parameters": {"x": 1}}' not in calls


def test_a_function_that_takes_any_arguments_gets_them():
    for parameters in ({"type": "object", "additionalProperties": True}, {"additionalProperties": {"type": "integer"}}):
        assert '{"name": "f", "parameters": {"x": 1}}' in arguments_of(parameters)


def test_arguments_are_an_object_whatever_else_the_type_allows():
    calls = arguments_of({"type": ["object", "null"], "properties": {"x": {"type": "integer"}}})
    assert '{"name": "f", "parameters": {"x": 1}}' in calls
    assert '{"name": "f", "parameters": null}' not in calls


TAGS = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "additionalProperties": False,
}


def test_one_of_several_functions_is_kept_to_as_much_of_its_schema_as_can_be():
    calls = arguments_of(TAGS)
    assert '{"name": "f", "parameters": {"tags": ["a", "b"]}}' in calls
    assert '{"name": "f", "parameters": {"tags": [1]}}' not in calls
    assert '{"name": "stop.now", "parameters": {}}' in calls


@pytest.mark.parametrize("form", FORMS)
def test_the_only_function_and_a_strict_one_are_refused_by_the_keyword(form):
    words, only = codec(()), Function(name="f", parameters=TAGS)
    for functions in ([only], [only.model_copy(update={"strict": True}), STOP]):
        with pytest.raises(ApiError, match=r"parameters of 'f' .*: properties\.tags\.uniqueItems: ") as refused:
            FORMS[form].grammar(functions, False, words)
        assert (refused.value.status, refused.value.param) == (400, "tools")


@pytest.mark.parametrize("form", FORMS)
def test_large_integers_of_arguments_are_written_as_they_are(form):
    words, number = codec(()), 1234567890123456789
    function = Function(name="f", parameters={"type": "object", "properties": {"id": {"enum": [number, 5]}}})
    grammar = FORMS[form].grammar([function, STOP], False, words)
    assert f'"{number}"' in grammar.rules
    compiled(grammar_tokens(words, 257), library_grammar(grammar.after_opening()))


@pytest.mark.parametrize("form", FORMS)
def test_an_error_of_the_library_names_the_function(form):
    nothing = {
        "type": "object",
        "properties": {"x": {"minimum": 5, "maximum": 2, "type": "integer"}},
        "required": ["x"],
    }
    functions, words = [STOP, Function(name="Get-it", parameters=nothing)], codec(())
    grammar = FORMS[form].grammar(functions, False, words)
    with pytest.raises(ValueError, match=r"^arguments_of_get_it_1: Unsatisfiable schema: ") as refused:
        compiled(grammar_tokens(words, 257), library_grammar(grammar.after_opening()))
    assert "%json" not in str(refused.value)


def test_a_bound_beyond_all_doubles_is_refused_or_dropped():
    parameters = {"properties": {"x": {"type": "integer", "minimum": 10**400}}}
    assert '{"name": "f", "parameters": {"x": 1}}' in arguments_of(parameters)
    with pytest.raises(ApiError, match=r"parameters of 'f' .*: properties\.x\.minimum: ") as refused:
        arguments_of(parameters, strict=True)
    assert (refused.value.status, refused.value.param) == (400, "tools")


def test_functions_share_the_work_that_schemas_may_take():
    """The ones after it are as free as one that cannot be enforced."""
    large = {"properties": {f"k{index}": {"type": "string"} for index in range(6000)}}
    with at_most(2):
        functions = [Function(name=f"f{index}", parameters=large) for index in range(30)]
        rules = FORMS["llama3"].grammar([*functions, STOP], False, codec(())).rules
    assert rules.count('"k5999"') == 1


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"x": {"allOf": [{"const": 2**60}]}}},
        {"properties": {"x": {"$ref": "#/$defs/0"}}}
        | {"$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(600)} | {"600": {"const": 2**60}}},
    ],
    ids=["beside allOf", "a chain of references"],
)
def test_a_large_integer_without_a_rule_is_free_among_others(parameters):
    assert '{"name": "f", "parameters": {"x": 1}}' in arguments_of(parameters)
    with pytest.raises(ApiError, match=r"the parameters of 'f' cannot be enforced: (expected int|it is too l)"):
        arguments_of(parameters, strict=True)
