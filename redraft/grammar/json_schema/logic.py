"""What follows from schemas: whether two have no value in common, what is not of one, which keys one looks at."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

from redraft.grammar.json_schema.document import TYPES, Document, Node, Schema
from redraft.grammar.json_schema.patterns import all_but

NUMBERS = {"integer", "number"}
DISJOINT_FORMATS = ("date", "date-time", "duration", "email", "ipv4", "ipv6", "time", "uuid")
"""Formats of which no two have a text in common"""
DEEPEST = 24
"""How far references and branches are followed."""
MAX_FORBIDDEN = 2000
"""Most characters of the texts that one schema forbids."""


class Logic:
    """Answers about the schemas of a document. Each is safe: False, or None, where it is not known."""

    def __init__(self, document: Document):
        self._document = document

    def parts(self, schema: Schema, depth: int = 0) -> Iterator[Node]:
        """A schema and all that it is joined with: a value of it is one of each."""
        if isinstance(schema, bool) or depth > DEEPEST:
            return
        self._document.spend()
        yield schema
        for part in schema.get("allOf", ()):
            yield from self.parts(part, depth + 1)
        if "$ref" in schema:
            yield from self.parts(self._document.target(schema), depth + 1)

    def disjoint(self, one: Schema, other: Schema, depth: int = 0) -> bool:
        """Whether no value is of both."""
        if one is False or other is False:
            return True
        if isinstance(one, bool) or isinstance(other, bool) or depth > DEEPEST:
            return False
        parts = [*self.parts(one)], [*self.parts(other)]
        types = _common_types([*parts[0], *parts[1]])
        if not types:
            return True
        formats = {part["format"] for part in chain(*parts) if part.get("format") in DISJOINT_FORMATS}
        if types == {"string"} and len(formats) > 1:
            return True
        for mine, theirs, rest in ((parts[0], parts[1], other), (parts[1], parts[0], one)):
            for part in mine:
                if "enum" in part or "const" in part:
                    values = part.get("enum", [part.get("const")])
                    if all(any(_rejects(their, value) for their in theirs) for value in values):
                        return True
                for branches in (part.get("anyOf"), part.get("oneOf")):
                    if branches and all(self.disjoint(branch, rest, depth + 1) for branch in branches):
                        return True
        if types == {"object"}:
            names = {name for part in chain(*parts) for name in part.get("required", ())}
            return any(self._disjoint_at(name, *parts, depth) for name in names)
        return types <= NUMBERS and _no_number([*parts[0], *parts[1]])

    def _disjoint_at(self, name: str, mine: list[Node], theirs: list[Node], depth: int) -> bool:
        pairs = ((left, other) for left in _values(mine, name) for other in _values(theirs, name))
        return any(self.disjoint(left, other, depth + 1) for left, other in pairs)

    def excluding(self, schema: Schema, other: Schema) -> Schema | None:
        """A schema that, joined with the first one, leaves only values that are not of the other."""
        if self.disjoint(schema, other):
            return True
        if (negated := self.negated(other)) is not None:
            return negated
        parts = [*self.parts(schema)], [*self.parts(other)]
        if _common_types([*parts[0], *parts[1]]) != {"object"}:
            return None
        names = dict.fromkeys(name for part in chain(*parts) for name in part.get("properties", {}))
        telling = [name for name in names if self._disjoint_at(name, *parts, 0)]
        return Node((), {"anyOf": [Node((), {"required": [name]}) for name in telling]}) if telling else None

    def negated(self, schema: Schema, depth: int = 0) -> Schema | None:
        """A schema whose values are not of this one: as many as can be said, or None where none can."""
        self._document.spend()
        if isinstance(schema, bool):
            return not schema
        if depth > DEEPEST:
            return None
        branches: list[Schema] = []
        for keyword, value in schema.items():
            branch = self._negated_keyword(keyword, value, schema, depth)
            if branch is None:
                return None
            branches += branch
        return Node(schema.path, {"anyOf": branches}) if branches else False

    def _negated_keyword(self, keyword: str, value: Any, schema: Node, depth: int) -> list[Schema] | None:
        """Schemas of all values that break one keyword."""

        def node(**keywords: Any) -> Node:
            return Node(schema.path, keywords)

        def negations(schemas: Any) -> list[Schema] | None:
            negated = [self.negated(schema, depth + 1) for schema in schemas]
            return None if None in negated else negated  # type: ignore[return-value]

        match keyword:
            case "$ref":
                return negations([self._document.target(schema)])
            case "not":
                return [value]
            case "allOf":
                return negations(value)
            case "anyOf":
                return None if (parts := negations(value)) is None else [node(allOf=parts)]
            case "type":
                covered = {*value, "integer"} if "number" in value else {*value}
                left = [name for name in TYPES if name not in covered]
                # an integer is a number: numbers that are none cannot be told apart from it
                left = [name for name in left if name != "number" or "integer" not in value]
                return [node(type=left)] if left else []
            case "const" | "enum":
                values = value if keyword == "enum" else [value]
                return _all_but(values, node)
            case "required":
                return [node(type=["object"], properties={name: False}) for name in value]
            case "properties":
                changed = {name: self.negated(subschema, depth + 1) for name, subschema in value.items()}
                if None in changed.values():
                    return None
                return [
                    node(type=["object"], properties={name: subschema}, required=[name])
                    for name, subschema in changed.items()
                ]
            case "minLength" | "minItems" | "minProperties" if value:
                kind = {"minLength": "string", "minItems": "array"}.get(keyword, "object")
                return [Node(schema.path, {"type": [kind], keyword.replace("min", "max"): value - 1})]
            case "maxLength" | "maxItems" | "maxProperties":
                kind = {"maxLength": "string", "maxItems": "array"}.get(keyword, "object")
                return [Node(schema.path, {"type": [kind], keyword.replace("max", "min"): value + 1})]
            case "minimum":
                return [node(type=["number"], exclusiveMaximum=value)]
            case "maximum":
                return [node(type=["number"], exclusiveMinimum=value)]
            case "exclusiveMinimum":
                return [node(type=["number"], maximum=value)]
            case "exclusiveMaximum":
                return [node(type=["number"], minimum=value)]
            case "minLength" | "minItems" | "minProperties" | "format":
                return []
            case "additionalProperties" if value is True:
                return []
        return None

    def evaluated(self, schema: Schema, depth: int = 0) -> set[str] | None:
        """The keys that an object's schema looks at; None where that depends on the object."""
        names = set[str]()
        for part in self.parts(schema, depth):
            if part.keys() & {
                "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties", "additionalProperties", "not",
            }:  # fmt: skip
                return None
            names |= part.get("properties", {}).keys()
        return names


def _all_but(values: list[Any], node: Any) -> list[Schema]:
    """Schemas of all values but these; of no list or object where one of these is one."""
    types, branches = {*TYPES} - {"integer"}, list[Schema]()
    if texts := [value for value in values if isinstance(value, str)]:
        types.discard("string")
        if sum(map(len, texts)) <= MAX_FORBIDDEN:
            branches.append(node(type=["string"], pattern=all_but(texts)))
    if numbers := sorted({value for value in values if _is_number(value)}):
        types.discard("number")
        gaps = [{"exclusiveMaximum": numbers[0]}, {"exclusiveMinimum": numbers[-1]}]
        gaps += [{"exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(numbers)]
        branches += [node(type=["number"], **gap) for gap in gaps]
    if bools := [value for value in values if isinstance(value, bool)]:
        types.discard("boolean")
        branches += [node(const=value) for value in (True, False) if value not in bools]
    types -= {kind for value in values for kind in TYPES if value is None and kind == "null"}
    types -= {name for value in values for name, kind in (("array", list), ("object", dict)) if isinstance(value, kind)}
    return [*([node(type=[name for name in TYPES if name in types])] if types else []), *branches]


def type_of(value: Any) -> str:
    """A value's type; a number without a fraction is an integer."""
    if _is_number(value):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    kinds = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _common_types(parts: list[Node]) -> set[str]:
    types = {*TYPES}
    for part in parts:
        for allowed in (
            part.get("type"),
            [type_of(value) for value in part["enum"]] if "enum" in part else None,
            [type_of(part["const"])] if "const" in part else None,
        ):
            if allowed is not None:
                types &= {*allowed, "integer"} if "number" in allowed else {*allowed}
    return types


def _rejects(part: Node, value: Any) -> bool:
    """Whether a value is certainly not of one part of a schema."""
    kind = type_of(value)
    types = part.get("type")
    if types is not None and kind not in types and not (kind == "integer" and "number" in types):
        return True
    if "const" in part and not same(part["const"], value):
        return True
    if "enum" in part and not any(same(member, value) for member in part["enum"]):
        return True
    if kind == "string":  # without its pattern: one that a client sends may take any time here
        return not part.get("minLength", 0) <= len(value) <= part.get("maxLength", len(value))
    return kind in NUMBERS and _no_number([part, Node((), {"minimum": value, "maximum": value})])


def same(left: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where 1 is 1.0 and not true."""
    if isinstance(left, bool) or isinstance(other, bool):
        return left is other
    if isinstance(left, list) and isinstance(other, list):
        return len(left) == len(other) and all(map(same, left, other))
    if isinstance(left, dict) and isinstance(other, dict):
        return left.keys() == other.keys() and all(same(left[name], other[name]) for name in left)
    return bool(left == other)


def _no_number(parts: list[Node]) -> bool:
    """Whether the bounds leave no number."""
    low = max([part[name] for part in parts for name in ("minimum", "exclusiveMinimum") if name in part], default=None)
    high = min([part[name] for part in parts for name in ("maximum", "exclusiveMaximum") if name in part], default=None)
    if low is None or high is None or low < high:
        return False
    excluded = any(part.get("exclusiveMinimum") == low or part.get("exclusiveMaximum") == high for part in parts)
    return low > high or excluded


def _values(parts: list[Node], name: str) -> Iterator[Schema]:
    """Each schema that the value at a key of an object must be of."""
    for part in parts:
        if name in part.get("properties", {}):
            yield part["properties"][name]
        elif "additionalProperties" in part and not part.get("patternProperties"):
            yield part["additionalProperties"]
