"""Calls as grammars, for answers that must call a function or keep to a format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redraft.grammar.json_schema import (
    MOST_REASONS,
    SchemaError,
    enforced_schema,
    loosened_schema,
    parsed_schema,
    schema_rules,
)
from redraft.openai.errors import ApiError
from redraft.openai.structured.formats import guide_for
from redraft.openai.structured.tools import Function
from redraft.request import Guide
from redraft.text import TextCodec

ANY_OBJECT = '{"type": "object"}'
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
            schema = enforced_schema(parsed_schema(wanted.text or ANY_OBJECT))
        except SchemaError as error:
            raise ApiError(400, f"{field}: the json_schema cannot be used: {error}", field) from None
        start = f"start: json | {self._opening(codec)} calls"
        return guide_for("tools", "grammar", "\n".join((start, json_rule("json", schema), self.rules)))


def terminal(text: str, codec: TextCodec) -> str:
    """A text in Lark; a special token's as that token."""
    token = codec.special_id(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def json_rule(name: str, schema: dict[str, Any]) -> str:
    """Rules of Lark: JSON that a schema describes, on one line unless the schema itself says otherwise. Raises ApiError
    where they have no place for a large integer of it."""
    try:
        return schema_rules(name, schema)
    except SchemaError as error:
        raise ApiError(400, f"tools: the grammar cannot be used: {error}", "tools") from None


def parameters_schema(function: Function, only: bool) -> dict[str, Any]:
    """The schema of a function's arguments, as far as a grammar can enforce it. Raises ApiError for what it cannot if
    the function is the `only` one that may be called, or is strict."""
    try:
        schema, problems = loosened_schema(function.parameters or {})
    except SchemaError as error:
        schema, problems = {"additionalProperties": True}, [str(error)]
    if problems and (only or function.strict):
        reasons = "; ".join(problems[:MOST_REASONS])
        raise ApiError(400, f"tools: the parameters of {function.name!r} cannot be enforced: {reasons}", "tools")
    schema = {"type": "object"} | {name: value for name, value in schema.items() if name not in ("type", "x-guidance")}
    return schema if schema.get("properties") or schema.keys() - {"type", "properties"} else NO_PARAMETERS
