"""A schema as rules of Lark. Most are a single `%json`; integers that the library would round are written out."""

from __future__ import annotations

import json
from typing import Any

from redraft.grammar.json_schema.document import REFERENCE, TYPES, SchemaError, Work
from redraft.grammar.json_schema.logic import type_of
from redraft.grammar.json_schema.patterns import all_but

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How a guide writes JSON, and `json.dumps`: nothing but the content is left to choose, and no answer is lost in white
space. It is not the library's default. A schema may have another form in its key `x-guidance`."""
EXACT = 2**53
"""The library takes numbers as doubles, which are exact up to here."""
CHARACTERS_PER_STEP = 100
"""What is written in about the time of a step."""
_OBJECT = {"properties", "required", "additionalProperties"}
_ARRAY = {"items", "prefixItems", "minItems", "maxItems"}


def schema_rules(name: str, schema: dict[str, Any], work: Work) -> str:
    """Rules for JSON that an enforced schema describes, the first of them by this name. Raises SchemaError for a large
    integer that would need a rule for a keyword that has none here, or more steps than `work` has left."""
    try:
        return _Rules(name, schema | {"x-guidance": ONE_LINE | schema.get("x-guidance", {})}, work).text
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None


def has_large_integers(value: Any) -> bool:
    """Whether JSON has an integer that a double rounds."""
    if isinstance(value, dict):
        return any(map(has_large_integers, value.values()))
    if isinstance(value, list):
        return any(map(has_large_integers, value))
    return isinstance(value, int) and abs(value) > EXACT


class _Rules:
    def __init__(self, name: str, root: dict[str, Any], work: Work):
        self._name, self._root, self._work = name, root, work
        self._bodies: list[str] = []
        self._targets: dict[str, str] = {}
        self._large = set[str]()
        """References to schemas that have large integers, themselves or by their references."""
        schema = {keyword: value for keyword, value in root.items() if keyword not in ("x-guidance", "$defs")}
        if not has_large_integers(root):
            self.text = f"{name}: {self._json(schema)}"
            return
        definitions = {REFERENCE + name: definition for name, definition in root.get("$defs", {}).items()}
        while more := {name for name in definitions.keys() - self._large if self._is_large(definitions[name])}:
            self._large |= more
        form = {name: value for name, value in root["x-guidance"].items() if name in (*ONE_LINE, "whitespace_pattern")}
        if form != ONE_LINE and self._is_large(schema):
            raise SchemaError(f"expected integers of at most {EXACT} in size beside x-guidance")
        first = self._expression(schema) if self._is_large(schema) else self._json(schema)
        self.text = "\n".join((f"{name}: {first}", *self._bodies))

    def _is_large(self, schema: Any) -> bool:
        """Whether a schema has large integers among its values, itself or by its references."""
        self._work.spend()
        if isinstance(schema, list):
            return any(map(self._is_large, schema))
        if not isinstance(schema, dict):
            return False
        if any(has_large_integers(schema[keyword]) for keyword in ("const", "enum") if keyword in schema):
            return True
        below = [child for keyword in ("properties", "patternProperties") for child in schema.get(keyword, {}).values()]
        below += [
            schema[keyword]
            for keyword in ("items", "additionalProperties", "prefixItems", "anyOf", "allOf")
            if keyword in schema
        ]
        return schema.get("$ref") in self._large or any(map(self._is_large, below))

    def _target(self, reference: str) -> Any:
        schema = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            schema = schema[part]
        return schema

    def _rule(self, body: str) -> str:
        name = f"{self._name}_{len(self._bodies)}"
        self._bodies.append(f"{name}: {body}")
        return name

    def _json(self, schema: Any) -> str:
        schema = schema if isinstance(schema, dict) else {"anyOf": [schema]}
        definitions = {"$defs": self._root["$defs"]} if "$defs" in self._root and '"$ref"' in json.dumps(schema) else {}
        # The last key: the library puts the last one where it has taken the options from, and the order counts.
        options = {"x-guidance": self._root["x-guidance"]}
        text = json.dumps(schema | definitions | options)
        self._work.spend(len(text) // CHARACTERS_PER_STEP)  # each has all definitions
        return f"%json {text}"

    def _expression(self, schema: Any) -> str:
        if not self._is_large(schema):
            return self._rule(self._json(schema))
        types, keywords = schema.get("type", TYPES), schema.keys() - {"type"}
        types = [types] if isinstance(types, str) else [*types]
        if keywords == {"$ref"} and len(types) == len(TYPES):
            return self._reference(schema["$ref"])
        if keywords == {"anyOf"} and len(types) == len(TYPES):
            return f"({' | '.join(self._expression(branch) for branch in schema['anyOf'] if branch is not False)})"
        if keywords <= {"const", "enum"}:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            texts = [json.dumps(value, ensure_ascii=False) for value in values if _is_of(value, types)]
            if not texts or len(keywords) > 1:
                raise SchemaError(f"no value meets {' and '.join(sorted(schema))}")
            return f"({' | '.join(map(_literal, texts))})"
        for own_keywords, kind, write in ((_OBJECT, "object", self._object), (_ARRAY, "array", self._array)):
            if keywords <= own_keywords and kind in types:
                others = [name for name in types if name != kind]
                branches = [write(schema), *([self._expression({"type": others})] if others else [])]
                return f"({' | '.join(branches)})"
        raise SchemaError(f"expected integers of at most {EXACT} in size beside {', '.join(sorted(keywords))}")

    def _reference(self, reference: str) -> str:
        if reference not in self._targets:
            name = self._targets[reference] = f"{self._name}_of_{len(self._targets)}"
            self._bodies.append(f"{name}: {self._expression(self._target(reference))}")
        return self._targets[reference]

    def _object(self, schema: dict[str, Any]) -> str:
        """Keys in the schema's order, then others: one rule for what may follow each key, and one for when there is no
        key yet."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        properties = properties | {name: others for name in required if name not in properties}
        after, first = "", ""
        if others is not False:
            names = self._rule(self._json({"type": "string", "pattern": all_but(properties)}))
            pair = self._rule(f'{names} ": " {self._expression(others)}')
            after = self._rule(f'(", " {pair})*')
            first = self._rule(f"({pair} {after})?")
        for name, child in reversed(properties.items()):
            if child is False and name not in required:
                continue
            pair = f"{_literal(json.dumps(name, ensure_ascii=False) + ': ')} {self._expression(child)}"
            pair = self._rule(pair)
            if name in required:
                after, first = self._rule(f'", " {pair} {after}'), self._rule(f"{pair} {after}")
            else:
                none_yet = f"{pair} {after} | {first}" if first else f"({pair} {after})?"
                after, first = self._rule(f'(", " {pair})? {after}'), self._rule(none_yet)
        return f'"{{" {first} "}}"'

    def _array(self, schema: dict[str, Any]) -> str:
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        count = len(prefix) if items is False else max(len(prefix), least, 1)
        count = count if most is None else min(count, most)
        if least > count:
            raise SchemaError(f"minItems: expected at most {count}, got {least}")
        rest = ""
        if items is not False and most != count:
            times = "*" if most is None else f"{{0,{most - count}}}"
            rest = self._rule(f'(", " {self._expression(items)}){times}')
        for index in reversed(range(count)):
            item = self._expression(prefix[index] if index < len(prefix) else items)
            separated = f"{item} {rest}" if index == 0 else f'", " {item} {rest}'
            rest = self._rule(separated if index < least else f"({separated})?")
        return f'"[" {rest} "]"'


def _literal(text: str) -> str:
    return json.dumps(text).replace("\x7f", r"\u007f")


def _is_of(value: Any, types: list[str]) -> bool:
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)
