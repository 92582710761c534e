"""Calls as grammars, for answers that must call a function or keep to a format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redraft.grammar.json_schema import (
    MOST_REASONS,
    SchemaError,
    Work,
    json_rules,
    loosened_schema,
    schema_rules,
)
from redraft.openai.errors import ApiError
from redraft.openai.structured.formats import guide_for
from redraft.openai.structured.tools import Function
from redraft.request import Guide
from redraft.text import TextCodec

ANY_OBJECT = {"type": "object"}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class CallGrammar:
    """The grammar of an answer that calls."""

    opening: Sequence[str]
    """What the calls begin with: texts, and special tokens."""
    rules: str
    """In Lark: the rule `calls`, what follows, and those that it needs."""

    def after_opening(self) -> Guide:
        """Calls, of which the prompt has the opening. Raises ApiError where the grammar is too long."""
        return guide_for("tools", "grammar", f"start: calls\n{self.rules}")

    def with_opening(self, codec: TextCodec) -> Guide:
        """Calls and their opening. Raises ApiError where the grammar is too long."""
        return guide_for("tools", "grammar", f"start: {self._opening(codec)} calls\n{self.rules}")

    def _opening(self, codec: TextCodec) -> str:
        return " ".join(terminal(part, codec) for part in self.opening)

    def or_json(self, field: str, wanted: Guide, codec: TextCodec) -> Guide:
        """Calls, or the JSON that a field wants. Raises ApiError where the grammar is too long, or the schema none."""
        try:
            rules = json_rules("json", wanted.text)
        except SchemaError as error:
            raise ApiError(400, f"{field}: the json_schema cannot be used: {error}", field) from None
        start = f"start: json | {self._opening(codec)} calls"
        return guide_for("tools", "grammar", "\n".join((start, rules, self.rules)))


def terminal(text: str, codec: TextCodec) -> str:
    """A text in Lark; a special token's as that token."""
    token = codec.special_id(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def arguments_rules(rule: str, function: Function, only: bool, work: Work) -> str:
    """Rules of a function's arguments as JSON, as far as a grammar can enforce their schema. Raises ApiError for what
    it cannot if the function is the `only` one that may be called, or is strict."""
    try:
        schema, problems = loosened_schema(function.parameters or {}, work)
        rules = schema_rules(rule, _of_an_object(schema), work)
    except SchemaError as error:
        rules, problems = schema_rules(rule, ANY_OBJECT, Work()), [str(error)]
    if problems and (only or function.strict):
        reasons = "; ".join(problems[:MOST_REASONS])
        raise ApiError(400, f"tools: the parameters of {function.name!r} cannot be enforced: {reasons}", "tools")
    return rules


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema's objects, on one line; that of none if it names no keys."""
    schema = {"type": "object"} | {name: value for name, value in schema.items() if name not in ("type", "x-guidance")}
    return schema if schema.get("properties") or schema.keys() - {"type", "properties"} else NO_PARAMETERS
