"""Arguments that are no JSON: values as texts, in Python, and between braces of Gemma's kind."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from redraft.loose_json import finite, mended, strict, value_end

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_PYTHON = {"True": True, "False": False, "None": None}
_JAVASCRIPT = {"true": True, "false": False, "null": None}
_BARE_KEY = re.compile(r"([{,]\s*)([\w.$-]+)(?=\s*:)")

_PYTHON_PARTS = re.compile(r""""(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+'|[^"'()\[\]{}]++|[()\[\]{}]""", re.DOTALL)


def escaped(text: str) -> str:
    """A part of a text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_text_only(parameters: Mapping[str, Any], name: str) -> bool:
    """Whether a function's parameters say that an argument is a text, and nothing else."""
    return _types(_property(parameters, name), parameters) == {"string"}


def typed_value(text: str, parameters: Mapping[str, Any], name: str) -> Any:
    """The value of an argument that a model wrote as a text, by what the function's parameters say of it: JSON, or what
    templates make of true, false and null in Python. What is none of these is the text."""
    types, word = _types(_property(parameters, name), parameters), text.strip()
    try:
        value = _PYTHON[word] if word in _PYTHON else finite(from_json(strict(mended(word)), allow_inf_nan=False))
    except ValueError:
        literal = keyword_arguments(f"value={word}") if types and "string" not in types else None
        value = text if literal is None or len(literal) > 1 else literal["value"]
    kind = _TYPES.get(type(value), "null")
    if "string" in types and kind not in types and not (kind == "integer" and "number" in types):
        return text
    return value


def closing_bracket(source: str) -> int | None:
    """Index of the bracket that closes a call in Python, after whose opening bracket the source begins; None where it
    has none."""
    depth, part = 0, _PYTHON_PARTS.match(source)
    while part is not None:
        depth += (part[0] in "([{") - (part[0] in ")]}")
        if depth < 0:
            return part.start()
        part = _PYTHON_PARTS.match(source, part.end())
    return None


def keyword_arguments(source: str) -> dict[str, Any] | None:
    """The arguments of a call in Python, between its brackets; None where they are not all named literals."""
    for text in (source, source.replace("\n", "\\n")):  # models write line feeds within texts
        try:
            with warnings.catch_warnings(action="ignore"):  # a backslash that escapes nothing
                call = ast.parse(f"f({text})", mode="eval").body
            if isinstance(call, ast.Call) and not call.args and all(keyword.arg for keyword in call.keywords):
                return _json_values({str(keyword.arg): _literal(keyword.value) for keyword in call.keywords})
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            continue
    return None


def braced_json(text: str, quote: str) -> str:
    """JSON of a text `{key:value}` whose texts stand between `quote`; the text may be cut off, or JSON."""
    if value_end(mended(text)) is not None:
        return text
    parts = text.split(quote)
    parts[::2] = [_BARE_KEY.sub(r'\1"\2"', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(parts) if len(parts) % 2 else "".join(parts)[:-1]


def _literal(node: ast.expr) -> Any:
    named = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
    if not named:
        return ast.literal_eval(node)
    return ast.literal_eval(_Names().visit(node))


class _Names(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Constant:
        if node.id not in _JAVASCRIPT:
            raise ValueError(node.id)
        return ast.Constant(_JAVASCRIPT[node.id])


def _json_values(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments as JSON has them. Raises ValueError or TypeError where it does not."""
    values = finite(json.loads(json.dumps(arguments)))
    json.dumps(values, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    return values


def _property(parameters: Mapping[str, Any], name: str) -> Any:
    properties = parameters.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types that a schema names; none where it allows all."""
    if not isinstance(schema, Mapping) or depth > 9:
        return set()
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        target: Any = root
        for key in reference[2:].split("/"):
            target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return _types(target, root, depth + 1)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return {_TYPES.get(type(value), "null") for value in values}
    if isinstance(types := schema.get("type"), str | list):
        return {types} if isinstance(types, str) else {kind for kind in types if isinstance(kind, str)}
    if isinstance(schema.get("allOf"), list):
        joined = [types for part in schema["allOf"] if (types := _types(part, root, depth + 1))]
        return set.intersection(*joined) if joined else set()
    for several in ("anyOf", "oneOf"):
        if isinstance(schema.get(several), list):
            types_of = [_types(part, root, depth + 1) for part in schema[several]]
            return set().union(*types_of) if all(types_of) else set()
    return set()
