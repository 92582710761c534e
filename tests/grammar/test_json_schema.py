"""Schemas that are accepted: an answer of one is always a value of the schema that was sent. The others are refused by
the path of the keyword."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import re
import uuid
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pydantic
import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from llguidance import LLMatcher

from redraft.grammar.json_schema import SchemaError, enforced_schema, json_rules, loosened_schema
from redraft.grammar.library import compiled, grammar_tokens, library_grammar
from redraft.request import Guide
from redraft.text import TextCodec
from tests.conftest import at_most
from tests.toy_engine import toy_tokenizer

VOCAB = 257
CODEC = TextCodec(toy_tokenizer(VOCAB))
TOKENS = grammar_tokens(CODEC, VOCAB)
ENDING = [CODEC.encode(character)[0] for character in '"}],0']
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
DRAFT_4, DRAFT_7 = ({"$schema": f"http://json-schema.org/draft-0{number}/schema#"} for number in (4, 7))
BIG = 1234567890123456789


def matcher(schema: Any) -> LLMatcher:
    return compiled(TOKENS, library_grammar(Guide(kind="json_schema", text=json.dumps(schema))))


def admits(start: LLMatcher, text: str) -> bool:
    state, ids = start.deep_copy(), CODEC.encode(text)
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


def answers(start: LLMatcher, count: int, seed: int = 0) -> list[Any]:
    """What random walks along the masks write, for those that end in time."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        state, ids = start.deep_copy(), []
        for step in range(400):
            if state.is_stopped() or (state.is_accepting() and rng.random() < 0.3):
                break
            mask = np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB]
            ending = [token for token in ENDING if mask[token]]
            allowed = [token for token in np.flatnonzero(mask) if CODEC.token_bytes(int(token)).isascii()]
            ids.append(int(rng.choice(ending if ending and rng.random() < (0.2 if step < 80 else 0.8) else allowed)))
            state.consume_token(ids[-1])
        if state.is_accepting():
            found.append(json.loads(b"".join(map(CODEC.token_bytes, ids))))
    return found


def a(**properties: Any) -> dict[str, Any]:
    """A schema of objects with some of these properties and no others."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


ACCEPTED: dict[str, tuple[Any, list[str], list[str]]] = {
    "true": (True, ['"x"', "{}"], []),
    "a format that nobody knows": (STRING | {"format": "path"}, ['"x"'], ["1"]),
    "a format of the library": (STRING | {"format": "date"}, ['"2024-02-29"'], ['"x"']),
    "a format of numbers": (INTEGER | {"format": "int64"}, ["5"], ['"5"']),
    "keywords of others": ({"type": "string", "nullable": True, "x-order": [1], "discriminator": {}}, ['"x"'], ["5"]),
    "a constant null": ({"const": None}, ["null"], ["1"]),
    "unique items that need not be": ({"type": "array", "uniqueItems": False}, ["[1, 1]"], ["1"]),
    "one unique item": ({"type": "array", "items": STRING, "uniqueItems": True, "maxItems": 1}, ['["x"]'], ["[1]"]),
    "unique items of few values": (
        {"type": "array", "items": {"$ref": "#/$defs/c"}, "uniqueItems": True, "$defs": {"c": {"enum": ["a", "b", 1]}}},
        ['["b", 1, "a"]', "[]"], ['["a", "a"]', '["c"]'],
    ),
    "names that are texts": ({"type": "object", "propertyNames": STRING, "additionalProperties": INTEGER},
                             ['{"x": 1}'], ['{"x": "1"}']),
    "listed names": ({"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "additionalProperties": INTEGER,
                      "$defs": {"n": {"enum": ["x", "y"]}}}, ['{"x": 1, "y": 2}', "{}"], ['{"z": 1}', '{"x": "1"}']),
    "names of a format": (
        {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": INTEGER},
        ['{"2024-02-28": 1}'], ['{"2024-02-31": 1}', '{"a": 1}'],
    ),
    "above a whole number, and below a fraction": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.01}, ["0.005", "0.01", "0.00003"], ["0", "0.0"],
    ),
    "above a whole number, and hardly below a fraction": (
        {"type": "number", "exclusiveMinimum": 2**40, "maximum": 2**40 + 0.01}, [f"{2**40}.005"], [str(2**40)],
    ),
    "above a whole number, and joined with a fraction": (
        {"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.01}]}, ["0.005", "0.01"], ["0", "0.0"],
    ),
    "above a number of a reference, and below a fraction": (
        a(x={"$ref": "#/$defs/p", "maximum": 0.01}) | {"$defs": {"p": {"type": "number", "exclusiveMinimum": 0}}},
        ['{"x": 0.005}'], ['{"x": 0}', '{"x": 0.0}'],
    ),
    "above a whole number, and below one of several": (
        {"type": "number", "exclusiveMinimum": 0, "anyOf": [{"maximum": 0.01}, {"minimum": 7}]}, ["0.005", "8"],
        ["0", "5"],
    ),
    "bounds of a property joined with others of it": (
        {"allOf": [a(x={"type": "number", "exclusiveMaximum": 0}), {"properties": {"x": {"minimum": -0.5}}}]},
        ['{"x": -0.25}'], ['{"x": 0}', '{"x": -1}'],
    ),
    "above a whole number, and not above a fraction": (
        {"type": "number", "exclusiveMinimum": 1, "not": {"exclusiveMinimum": 1.5}}, ["1.5", "1.25"], ["1", "1.6"],
    ),
    "above a whole number of two bounds": (
        {"type": "number", "minimum": 0.005, "exclusiveMinimum": 0, "maximum": 0.01}, ["0.005"], ["0", "0.001"],
    ),
    "up to a whole number": ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 1}, ["0.99999999999999"], ["1"]),
    "above a fraction, and below a whole number": (
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, ["-1.25", "-1.5"], ["-1", "-1.0"],
    ),
    "two bounds on one side": (
        {"type": "number", "exclusiveMinimum": -1, "maximum": -0.6, "exclusiveMaximum": 0}, ["-0.8", "-0.6"], ["-0.4"],
    ),
    "bounds that doubles round": (
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, [str(2**53 + 2)], [str(2**53 + 4)],
    ),
    "names of a pattern": ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"xy": 1}'], ['{"y": 1}']),
    "names of a length": ({"type": "object", "propertyNames": {"maxLength": 2}}, ['{"xy": 1}'], ['{"xyz": 1}']),
    "no names": ({"type": "object", "propertyNames": False}, ["{}"], ['{"x": 1}']),
    "never": (a(x=INTEGER, never={"not": {}}), ['{"x": 1}', "{}"], ['{"x": 1, "never": 1}', '{"never": 1}']),
    "not nothing": ({"not": False, "type": "string"}, ['"x"'], ["1"]),
    "not a type": ({"not": {"type": ["string", "object"]}}, ["1", "null"], ['"x"', "{}"]),
    "not a value": (STRING | {"not": {"enum": ["ab", "a"]}}, ['""', '"b"', '"abc"'], ['"a"', '"ab"']),
    "not a number": (INTEGER | {"not": {"const": 5}}, ["4", "6", "55"], ["5"]),
    "not both": (a(x=INTEGER, y=INTEGER) | {"not": {"required": ["x", "y"]}}, ['{"x": 1}', "{}"], ['{"x": 1, "y": 1}']),
    "numbers or integers apart": ({"oneOf": [{"type": "string"}, {"type": "number"}]}, ["1", '"x"'], ["null"]),
    "discriminated by a reference": (
        {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
         "$defs": {kind: a(kind={"const": kind}, value=INTEGER) | {"required": ["kind"]} for kind in "AB"}},
        ['{"kind": "A", "value": 1}', '{"kind": "B"}'], ['{"kind": "C"}', "{}"],
    ),
    "exactly one key": (
        a(x=INTEGER, y=INTEGER) | {"oneOf": [{"required": ["x"]}, {"required": ["y"]}]},
        ['{"x": 1}', '{"y": 1}'], ["{}", '{"x": 1, "y": 1}'],
    ),
    "branches told by their keys": ({"oneOf": [a(x=INTEGER), a(y=INTEGER)]}, ['{"x": 1}', '{"y": 1}'], ["{}"]),
    "one of overlapping ranges": (
        {"type": "integer", "oneOf": [{"maximum": 10}, {"minimum": 5}]}, ["4", "11"], ["5", "7", "10"],
    ),
    "required together": (
        a(x=INTEGER, y=INTEGER) | {"dependentRequired": {"x": ["y"]}}, ["{}", '{"y": 1}', '{"x": 1, "y": 1}'],
        ['{"x": 1}'],
    ),
    "dependencies": (
        DRAFT_7 | a(x=INTEGER, y=INTEGER) | {"dependencies": {"x": ["y"], "y": {"properties": {"y": {"minimum": 5}}}}},
        ["{}", '{"y": 5}', '{"x": 1, "y": 5}'], ['{"x": 1}', '{"y": 1}'],
    ),
    "if": (
        a(kind={"enum": ["p", "q"]}, port=INTEGER) | {"required": ["kind"]}
        | {"if": {"properties": {"kind": {"const": "p"}}}, "then": {"required": ["port"]}},
        ['{"kind": "p", "port": 1}', '{"kind": "q"}'], ['{"kind": "p"}'],
    ),
    "then by itself": (STRING | {"then": False}, ['"x"'], ["1"]),
    "contains": ({"type": "array", "contains": {"const": 5}}, ['[5, "x"]'], ["[]", "[1]"]),
    "contains nothing": ({"type": "array", "contains": {"const": 5}, "minContains": 0}, ["[]", "[1]"], ["1"]),
    "unevaluated keys": (
        {"$ref": "#/$defs/x", "properties": {"y": INTEGER}, "unevaluatedProperties": False, "$defs": {
            "x": {"type": "object", "properties": {"x": INTEGER}}}},
        ['{"x": 1, "y": 1}'], ['{"y": 1, "z": 1}'],
    ),
    "at least one key": (a(x=INTEGER, y=INTEGER) | {"minProperties": 1}, ['{"x": 1}', '{"y": 1}'], ["{}"]),
    "at most one key": (a(x=INTEGER, y=INTEGER) | {"maxProperties": 1}, ['{"x": 1}', "{}"], ['{"x": 1, "y": 1}']),
    "an anchor": ({"$ref": "#spot", "$defs": {"s": INTEGER | {"$anchor": "spot"}}}, ["5"], ['"x"']),
    "an identifier": (
        {"$id": "https://example.com/a", "$ref": "b", "$defs": {"s": INTEGER | {"$id": "https://example.com/b"}}},
        ["5"], ['"x"'],
    ),
    "an identifier of draft 4": (
        DRAFT_4 | {"id": "http://example.com/a", "$ref": "b", "definitions": {"s": INTEGER | {"id": "b"}}},
        ["5"], ['"x"'],
    ),
    "a reference into an unknown keyword": (
        {"$ref": "#/components/x", "components": {"x": {"type": "string", "format": "unheard-of"}}}, ['"x"'], ["5"],
    ),
    "a reference to itself": (
        a(next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}), ['{"next": {"next": null}}'], ['{"next": 5}'],
    ),
    "what stands beside a reference in draft 7": (
        DRAFT_7 | {"$ref": "#/definitions/s", "type": "string", "definitions": {"s": INTEGER}}, ["5"], ['"x"'],
    ),
    "exclusive bounds of draft 4": (
        DRAFT_4 | INTEGER | {"minimum": 3, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": False},
        ["4", "5"], ["3", "6"],
    ),
    "items of draft 7": (
        DRAFT_7 | {"type": "array", "items": [INTEGER, STRING], "additionalItems": False}, ['[1, "x"]'], ["[1, 2]"],
    ),
    "counts with a fraction": ({"type": "string", "minLength": 2.0}, ['"xy"'], ['"x"']),
    "bounds of any double": ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
                             ["5", "-10000", "1.5"], ['"x"']),
    "a bound of 64 bits": (INTEGER | {"minimum": -(2**63), "maximum": 2**64 - 1}, ["5", "-5"], ["0.5"]),
    "ahead of a pattern": (
        STRING | {"pattern": r"^(?=.*[0-9])(?=.*[a-z])[a-z0-9]{2,}$"}, ['"a1"', '"1a"'], ['"aa"', '"11"'],
    ),
    "not ahead of a pattern": (
        STRING | {"pattern": "^(?!aws:)[a-z:]+$"}, ['"x"', '"aw"', '"aws"'], ['"aws:x"', '"aws:"'],
    ),
    "not one of several ahead": (
        STRING | {"pattern": "^(?!foo|bar$)[a-z|]+$"}, ['"fo"', '"bar|"', '"x"'], ['"foo"', '"foo|"', '"bar"'],
    ),
    "no escaped bar ahead": (STRING | {"pattern": r"^(?!a\|b)[ab|]+$"}, ['"a"', '"b"'], ['"a|b"']),
    "not blank": (STRING | {"pattern": r"^(?!\s*$).+"}, ['"x"', '" x "'], ['""', '"  "']),
    "braces that repeat nothing": (STRING | {"pattern": r"^{{[a-z]{2}}}$"}, ['"{{ab}}"'], ['"{{a}}"', '"ab"']),
    "escaped angle brackets": (STRING | {"pattern": r"^\<[\<\>]\>$"}, ['"<>>"'], ['"<a>"']),
    "a class without a quote": (STRING | {"pattern": r'^[^"]+$'}, ['"a\\\\"', r'"\n"'], [r'"\""']),
    "a class without backslashes": (
        STRING | {"pattern": r'^[^<>:"/\\|?*]+$'}, ['"a.b"', r'"\t"'], [r'"\""', r'"a\\b"'],
    ),
    "a class that begins with a hyphen": (STRING | {"pattern": r"^[^-]+$"}, ['"a,b"'], ['"-"']),
    "a class of control characters": (STRING | {"pattern": r"^[\0-\x1f]+$"}, [r'"\n"'], [r'"\""', r'"\\"']),
    "control characters from a raw 0 on": (STRING | {"pattern": "^[\0-\x1f]+$"}, [r'"\n"'], [r'"\""', r'"\\"']),
    "control characters after 0": (STRING | {"pattern": r"^[\x00\x01-\x1f]+$"}, [r'"\n"'], [r'"\""', r'"\\"']),
    "0 or another control character": (STRING | {"pattern": r"^(?:\0|[\x01-\x1f])+$"}, [r'"\n"'], [r'"\""', r'"\\"']),
    "0 or another one of two classes": (
        STRING | {"pattern": r"^(?:[\u0000a]|[\x01-\x1f])+$"}, [r'"\n"', '"a"'], [r'"\""', r'"\\"'],
    ),
    "0 before a hyphen": (STRING | {"pattern": r"^[\0-]x$"}, ['"-x"'], [r'"\u0001x"', '"x"']),
    "0 or nothing": (STRING | {"pattern": r"^[\0]?x$"}, ['"x"'], ['"0x"']),
    "brackets beside classes": (STRING | {"pattern": r"^]?[\]a]][^b]]$"}, ['"]]c]"', '"]a]c]"'], ['"]]b]"']),
    "a backspace": (STRING | {"pattern": r"^[\b]x$"}, [r'"\bx"'], ['"bx"']),
    "zod's email": (
        STRING
        | {
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
            r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
        },
        ['"a.b@c-d.org"'], ['"a..b@c.org"', '".a@b.org"'],
    ),
    "a run that is nowhere ahead": (STRING | {"pattern": "^(?!.*[-_]{2})[a-z_-]+$"}, ['"a-b_"'], ['"a-_b"', '"__"']),
    **{
        f"a letter nowhere ahead, {pattern}": (
            STRING | {"pattern": f"^{pattern}[a-z]+$"}, ['"ab"', '"axxb"'] if "{3}" in pattern else ['"ab"'],
            ['"axxxb"', '"abxxx"'],
        )
        for pattern in (
            "(?!.*x.*$)", "(?!.*x.*)", "(?!.*x)", r"(?!.*x[\s\S]*)", r"(?![\s\S]*x[\s\S]*$)", "(?!.*[xy].*$)",
            "(?!.*x{3}.*$)", "(?!.*xxx.*$)",
        )
    },
    "no blank ahead": (STRING | {"pattern": r"^(?!.*\s.*$).+$"}, ['"ab"'], ['"a b"', '" "', '"a "']),
    "another start ahead": (STRING | {"pattern": "^(?!x.*$)[a-z]+$"}, ['"ax"'], ['"x"', '"xa"']),
    "another end of a letter ahead": (STRING | {"pattern": "^(?!.*x$)[a-z]+$"}, ['"axb"'], ['"x"', '"ax"']),
    "another text ahead": (STRING | {"pattern": "^(?!x$)[a-z]+$"}, ['"xa"', '"ax"'], ['"x"']),
    "no backslash ahead": (STRING | {"pattern": r"^(?!.*\\.*$).+$"}, ['"ab"'], [r'"a\\b"']),
    "dots ahead": (STRING | {"pattern": r"^(?!a\.)[a-z.]+$"}, ['"a"', '"ab."'], ['"a."', '"a.b"']),
    "another end ahead": (STRING | {"pattern": r"^(?!.*\.$)[a.]+$"}, ['"a.a"', '"a"'], ['"a."']),
    "another end behind": (STRING | {"pattern": "^(?!-)[a-z-]{1,63}(?<!-)$"}, ['"a-b"', '"a"'], ['"a-"', '"-"']),
    "a bracket in a class": (STRING | {"pattern": r"^[[\]&&~a-c]+$"}, ['"[]"', '"&~"'], ['"d"']),
    "a large constant": ({"const": BIG}, [str(BIG)], [str(BIG - 21), str(BIG + 1)]),
    "large values": ({"enum": [BIG, -BIG, "x", None]}, [str(-BIG), '"x"', "null"], [str(BIG + 1)]),
    "large values of a type": ({"type": "integer", "enum": [BIG, "x"]}, [str(BIG)], ['"x"']),
    "a large value within one": ({"const": {"id": [BIG, "x"]}}, [f'{{"id": [{BIG}, "x"]}}'], ['{"id": [1, "x"]}']),
    "a large value of a key": (
        a(id={"const": BIG}, name=STRING, size=INTEGER) | {"required": ["name"]},
        [f'{{"id": {BIG}, "name": "x"}}', '{"name": "x", "size": 5}'],
        [f'{{"id": {BIG + 1}, "name": "x"}}', f'{{"id": {BIG}}}', "{}", '{"name": "x", "other": 5}'],
    ),
    "a large value beside other keys": (
        {"properties": {"id": {"const": BIG}}}, [f'{{"id": {BIG}, "x": [1]}}', '{"x": 1, "y": 2}', "5", "{}"],
        [f'{{"id": {BIG + 1}}}', '{"x": 1, "id": 2}'],
    ),
    "large items": (
        {"type": "array", "items": {"anyOf": [{"const": BIG}, {"type": "null"}]}, "minItems": 1, "maxItems": 3},
        [f"[{BIG}]", f"[null, {BIG}, null]"], ["[]", "[null, null, null, null]", f"[{BIG + 1}]"],
    ),
    "large values of a list": (
        {"type": "array", "prefixItems": [{"const": BIG}, STRING], "items": False}, [f'[{BIG}, "x"]', f"[{BIG}]", "[]"],
        ["[1]", f'[{BIG}, "x", 1]'],
    ),
    "a large value that refers to itself": (
        {"$ref": "#/$defs/t", "$defs": {"t": a(v={"const": BIG}, t={"$ref": "#/$defs/t"}) | {"required": ["v"]}}},
        [f'{{"v": {BIG}, "t": {{"v": {BIG}}}}}'], ['{"v": 5}', f'{{"v": {BIG}, "t": {{"v": 5}}}}'],
    ),
    "bounds that leave all doubles": (INTEGER | {"minimum": -(10**400), "maximum": 10**400}, ["5", "-5"], ["0.5"]),
    "a large bound": (INTEGER | {"minimum": 2**53 + 1}, [str(2**53 + 2), str(2**60)], [str(2**53), "5"]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Possible (nested set|set intersection):FutureWarning")
@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_schema_admits_its_values_only(name):
    schema, valid, invalid = ACCEPTED[name]
    start = matcher(schema)
    judge = validator_for(schema, default=Draft202012Validator)(schema) if isinstance(schema, dict) else None
    for text in valid:
        assert judge is None or judge.is_valid(json.loads(text)), text
        assert admits(start, text), text
    assert not any(admits(start, text) for text in invalid)
    for value in answers(start, 5):
        assert judge is None or judge.is_valid(value), value


class Colour(enum.Enum):
    RED, BLUE = "red", "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


class Tree(pydantic.BaseModel):
    value: int
    children: list[Tree] = []


class Pair(NamedTuple):
    first: int
    second: str = "b"


PYDANTIC = [
    str, int, float, bool, None, bytes, object, Any, decimal.Decimal, datetime.date, datetime.datetime, datetime.time,
    datetime.timedelta, uuid.UUID, pathlib.Path, ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network,
    ipaddress.IPv4Interface, re.Pattern, Colour, Literal["a", 1, None], list[int], tuple[int, str], tuple[int, ...],
    dict[str, int], dict[Colour, int], dict[int, str], set[Colour], int | None, Pair, Tree, Cat | Dog,
    Annotated[Cat | Dog, pydantic.Field(discriminator="kind")], pydantic.SecretStr, pydantic.HttpUrl, pydantic.Json,
    pydantic.Base64Bytes, pydantic.FilePath, pydantic.UUID4, pydantic.PastDate, pydantic.ByteSize, pydantic.PostgresDsn,
    pydantic.IPvAnyAddress, pydantic.ImportString, pydantic.conint(multiple_of=5, ge=10), pydantic.PositiveFloat,
    pydantic.condecimal(max_digits=5, decimal_places=2), pydantic.constr(pattern="^[a-z]+$", max_length=5),
]  # fmt: skip


@pytest.mark.parametrize("kind", PYDANTIC, ids=str)
def test_pydantics_types_are_accepted(kind):
    schema = pydantic.TypeAdapter(kind).json_schema()
    for value in answers(matcher(schema), 5):
        Draft202012Validator(schema).validate(value)


ZOD = [
    a(a={"type": "number"}, b={"not": {}}) | {"required": ["a"]},
    {"type": "object", "propertyNames": STRING, "additionalProperties": {"type": "number"}},
    {"type": "object", "propertyNames": STRING | {"enum": ["a", "b"]}, "additionalProperties": {"type": "number"},
     "required": ["a", "b"]},
    {"anyOf": [STRING, {"type": "array", "items": {"$ref": "#"}},
               {"type": "object", "propertyNames": STRING, "additionalProperties": {"$ref": "#"}}]},
    STRING | {"format": "emoji", "pattern": r"^(?=[\s\S]*[\p{Extended_Pictographic}])[\p{Emoji_Component}]+$"},
    STRING | {"format": "hostname", "pattern": r"^(?=.{1,253}\.?$)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$"},
    STRING | {"format": "nanoid", "pattern": "^[a-zA-Z0-9_-]{21}$"},
    {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    {"oneOf": [a(kind=STRING | {"const": kind}) | {"required": ["kind"]} for kind in "ab"]},
]  # fmt: skip


@pytest.mark.parametrize("schema", ZOD, ids=str)
def test_what_zod_writes_is_accepted(schema):
    matcher(schema)


REFUSED: dict[str, tuple[Any, str]] = {
    "unique items": (a(tags={"type": "array", "uniqueItems": True}), r"^properties\.tags\.uniqueItems: "),
    "branches within each other": ({"oneOf": [INTEGER, {"type": "number"}]}, "^oneOf: .*expected anyOf"),
    "branches that are the same": ({"oneOf": [STRING, STRING]}, "^oneOf: .*expected anyOf"),
    "branches that overlap": ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "^oneOf: .*expected anyOf"),
    "not of a pattern": (a(x={"not": {"pattern": "x"}}), r"^properties\.x\.not: "),
    "look-behind": (a(x={"pattern": "(?<!a)b"}), r"^properties\.x\.pattern: .*look-around"),
    "a reference back": ({"pattern": r"(a)\1"}, r"^pattern: \\1"),
    "another document": ({"$ref": "https://example.com/x"}, r"^\$ref: expected a reference within the schema"),
    "in a definition": ({"$ref": "#/$defs/x", "$defs": {"x": {"uniqueItems": True}}}, r"^\$defs\.x\.uniqueItems: "),
    "an unknown type": (a(x={"type": "any"}), r"^properties\.x\.type: expected one of null, boolean, integer"),
    "required as draft 3 has it": (a(x={"required": True}), r"^properties\.x\.required: expected a list of names"),
    "no schema": (a(x=5), r"^properties\.x: expected a schema, got 5"),
    "an infinite bound": ({"maximum": float("inf")}, "^maximum: expected a finite number"),
    "a bound beyond all doubles": (a(x=INTEGER | {"minimum": 10**400}), r"^properties\.x\.minimum: expected at most"),
    "an exclusive bound beyond all doubles": ({"exclusiveMaximum": -(10**400)}, "^exclusiveMaximum: expected at most"),
    "dots that repeat ahead": ({"pattern": r"^(?!\.*)a"}, "^pattern: .*look-around"),
    "an infinite constant of a branch": ({"oneOf": [{"const": float("inf")}, STRING]}, r"^oneOf\[0\]\.const: "),
    "an infinite constant": (a(x={"const": [float("inf")]}), r"^properties\.x\.const: "),
    "several": ({"uniqueItems": True, "minProperties": 2}, "^uniqueItems: .*; minProperties: "),
    "too large": (a(**{str(i): {"type": "string"} for i in range(30_000)}), "too large"),
}


def test_a_large_integer_has_no_rules_beside_some_keywords():
    with pytest.raises(SchemaError, match="at most 9007199254740992 in size beside allOf"):
        json_rules("start", json.dumps({"allOf": [{"const": BIG}]}))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_keyword_by_its_path(name):
    schema, message = REFUSED[name]
    with pytest.raises(SchemaError, match=message):
        enforced_schema(schema)


def test_a_null_is_an_absent_keyword():
    start = matcher({"type": "array", "items": None, "enum": None, "$ref": None})
    assert admits(start, "[1]")
    assert not admits(start, "1")


@pytest.mark.parametrize("key", ["default", "examples", "x-anything"])
def test_annotations_may_have_any_value(key):
    assert admits(matcher({"type": "integer", key: [float("inf"), BIG]}), "5")


def test_a_reason_of_the_library_is_without_the_grammar():
    with pytest.raises(ValueError, match=r"^Unsatisfiable schema: minimum \(5\) is greater than maximum \(2\)$"):
        matcher({"type": "integer", "minimum": 5, "maximum": 2})


def test_a_loosened_schema_keeps_what_can_be_enforced():
    schema, problems = loosened_schema(a(tags={"type": "array", "items": STRING, "uniqueItems": True}))
    assert [problem.partition(":")[0] for problem in problems] == ["properties.tags.uniqueItems"]
    start = matcher(schema)
    assert admits(start, '{"tags": ["x", "x"]}')
    assert not admits(start, '{"tags": [1]}')
    assert admits(matcher(a(x={"uniqueItems": True}) | {"x-guidance": {"lenient": True}}), '{"x": [1, 1]}')


def chain(length: int, end: dict) -> dict:
    """Definitions each of which refers to the next one."""
    links = {str(index): {"items": {"$ref": f"#/$defs/{index + 1}"}} for index in range(length)}
    return links | {str(length): end}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [a(**{f"k{j}": STRING for j in range(i, i + 20)}) for i in range(200)]},
        {"$ref": "#/$defs/0", "$defs": {str(i): {"oneOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(99)}},
        a(**{f"k{i}": STRING for i in range(40)})
        | {"dependentRequired": {f"k{i}": [f"k{i + 1}"] for i in range(39)}},
        {"pattern": "^" + "(?=" * 5000},
        {"not": {"enum": ["a" * 5000 + str(i) for i in range(500)]}},
        {"$ref": "#/$defs/0", "$defs": chain(2000, {"const": BIG})},
        a(**{f"k{i}": {"$ref": "#/$defs/0"} for i in range(2000)}, big={"const": BIG})
        | {"$defs": {"0": {"enum": ["x" * 100_000]}}},
        a(**{f"k{i}": {"$ref": f"#/$defs/{i}"} for i in range(2000)}, big={"const": BIG})
        | {"$defs": chain(2000, STRING)},
    ],
    ids=[
        "branches", "references", "dependencies", "pattern", "forbidden texts", "chain", "repeated definition",
        "references to a chain",
    ],
)  # fmt: skip
def test_hostile_schemas_take_little_time(schema):
    with at_most(5), suppress(SchemaError):
        json_rules("start", json.dumps(schema))


def test_a_long_chain_of_references_is_read():
    assert '"x"' in json_rules("start", json.dumps({"$ref": "#/$defs/0", "$defs": chain(900, {"const": "x"})}))


def test_one_of_two_formats():
    """Validators that do not look at formats find both."""
    start = matcher({"oneOf": [STRING | {"format": "date"}, STRING | {"format": "ipv4"}]})
    assert admits(start, '"2024-02-28"')
    assert admits(start, '"1.2.3.4"')
    assert not admits(start, '"a"')
