"""A schema in the keywords that the grammar library enforces: each of its values is one of the schema that was sent.

Where a keyword has no such form, the schema is refused by that keyword's path, or loosened. Some keywords leave fewer
values than the schema does: `contains` wants its items first, a discriminated branch excludes the others.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from itertools import chain, combinations, permutations
from typing import Any

from redraft.grammar.json_schema.document import REFERENCE, TYPES, Document, LongPath, Node, Schema, SchemaError, Work
from redraft.grammar.json_schema.logic import Logic, same
from redraft.grammar.json_schema.patterns import ANY_TEXT, split_pattern
from redraft.grammar.json_schema.rules import EXACT, schema_rules
from redraft.request import shown

FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
"""Those that the library knows. Others say something about a text without constraining it."""
_DATE = r"\d{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
FORMATS_OF_KEYS = {
    "date": f"^{_DATE}$",
    "date-time": rf"^{_DATE}T(?:[01]\d|2[0-3])(?::[0-5]\d){{2}}Z$",
    "uuid": "^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
}
"""Patterns of formats that keys have, with fewer texts than the format: the library takes no format there."""
LARGEST = 10**18 - 2**7
"""The largest bound of a number that the library takes. It computes with doubles, which count in steps of 128 there."""
BOUNDS = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}
STEP = 1e-12
"""The part of the range between two bounds that is left out where one of them cannot be exclusive."""
MOST_BRANCHES = 64
"""Branches that one keyword may become."""
MOST_LISTS = 100
"""Lists of different values that are written out: those of four values."""
MOST_REASONS = 3
ROOT_OPTIONS = "x-guidance"


def json_rules(rule: str, text: str) -> str:
    """Rules of Lark for JSON that a schema's text describes, or for any object where it is empty; the first of them has
    this name. Raises SchemaError."""
    work = Work()
    return schema_rules(rule, enforced_schema(_parsed(text) if text else {"type": "object"}, work), work)


def enforced_schema(schema: Any, work: Work | None = None) -> dict[str, Any]:
    """The schema as the library enforces all of it. Raises SchemaError with the paths of what it cannot enforce."""
    rewritten, problems = loosened_schema(schema, work)
    if problems and not _options(schema).get("lenient"):
        raise SchemaError("; ".join(problems[:MOST_REASONS]))
    return rewritten


def loosened_schema(schema: Any, work: Work | None = None) -> tuple[dict[str, Any], list[str]]:
    """The schema without what the library cannot enforce, and the paths of that. Raises SchemaError where it is no
    schema at all, or takes more steps than `work` has left."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise SchemaError(f"expected a JSON schema, got {shown(schema)}")
    try:
        document = Document(schema, work or Work())
        rewritten = _Rewriter(document).rewritten()
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    if options := _options(schema):
        rewritten |= {ROOT_OPTIONS: options}
    return rewritten, document.problems


def _parsed(text: str) -> Any:
    """The JSON of a schema. Raises SchemaError."""
    try:
        return json.loads(text)
    except ValueError:
        raise SchemaError(f"expected a JSON schema, got {shown(text)}") from None
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None


def _options(schema: Any) -> dict[str, Any]:
    options = schema.get(ROOT_OPTIONS) if isinstance(schema, dict) else None
    return options if isinstance(options, dict) else {}


class _Rewriter:
    def __init__(self, document: Document):
        self._document, self._logic = document, Logic(document)
        self._definitions: dict[str, Any] = {}
        self._bounded: list[dict[str, Any]] = []
        """The rewritten schemas that have bounds of numbers."""
        self._pending: list[str] = []

    def rewritten(self) -> dict[str, Any]:
        root = self._schema(self._document.root)
        while self._pending:
            name = self._pending.pop()
            self._definitions[name] = self._schema(self._document.definitions[name])
        _tighten(self._bounded)
        root = root if isinstance(root, dict) else {"anyOf": [root]}
        return root | {"$defs": self._definitions} if self._definitions else root

    def _schema(self, node: Schema) -> Any:
        self._document.spend()
        if isinstance(node, bool):
            return node
        result: dict[str, Any] = {}
        also: list[Any] = []
        for keyword in sorted(node, key="propertyNames".__eq__):  # that one last: it replaces other keywords
            value, path = node[keyword], (*node.path, keyword)
            match keyword:
                case "$ref":
                    if value not in self._definitions:
                        self._definitions[value] = True
                        self._pending.append(value)
                    result["$ref"] = REFERENCE + value
                case "type":
                    result["type"] = value[0] if len(value) == 1 else value
                case "const" | "enum":
                    if _is_finite(value):
                        result[keyword] = value
                    else:
                        self._problem(path, "expected finite numbers")
                case keyword if keyword in BOUNDS:
                    self._bound(result, keyword, value, path)
                case "format":
                    if value in FORMATS:
                        result["format"] = value
                case "pattern":
                    try:
                        first, *rest = split_pattern(value)
                        result["pattern"] = first
                        also += [{"pattern": part} for part in rest]
                    except ValueError as error:
                        self._problem(path, str(error))
                case "properties":
                    result[keyword] = {name: self._schema(part) for name, part in value.items()}
                case "patternProperties":
                    result[keyword] = {
                        self._one_pattern(name, (*path, name)): self._schema(part) for name, part in value.items()
                    }
                case "items" | "additionalProperties":
                    result[keyword] = self._schema(value)
                case "allOf" | "anyOf" | "prefixItems":
                    if value:
                        result[keyword] = [self._schema(part) for part in value]
                    elif keyword == "anyOf":
                        self._problem(path, "expected at least one schema")
                case "oneOf" if "anyOf" in node:
                    also.append({"anyOf": self._one_of(value, path)})
                case "oneOf":
                    result["anyOf"] = self._one_of(value, path)
                case "not":
                    self._join(also, self._logic.negated(value), path)
                case "if":
                    self._condition(node, value, also, path)
                case "dependentRequired":
                    for name, names in value.items():
                        self._depends(name, Node(path, {"required": names}), also, (*path, name))
                case "dependentSchemas":
                    for name, part in value.items():
                        self._depends(name, part, also, (*path, name))
                case "contains":
                    self._contains(node, value, also, path)
                case "propertyNames":
                    self._names(node, value, result, also, path)
                case "uniqueItems":
                    self._unique(node, also, path)
                case "unevaluatedProperties" if "additionalProperties" not in node:
                    self._unevaluated(node, value, also, path)
                case "unevaluatedItems" if "items" not in node:
                    if node.keys() & {"allOf", "anyOf", "oneOf", "if", "$ref", "not", "contains"}:
                        self._problem(path, "it cannot be enforced beside other schemas of the list")
                    else:
                        result["items"] = self._schema(value)
                case "minProperties" | "maxProperties":
                    self._count(node, keyword, value, result, also, path)
                case "minLength" | "maxLength" | "minItems" | "maxItems" | "required" | "multipleOf":
                    result[keyword] = value
        if result.keys() & BOUNDS:
            self._bounded.append(result)
        if also:
            result["allOf"] = [*result.get("allOf", []), *also]
        return result

    def _problem(self, path: LongPath, text: str) -> None:
        self._document.problem(path, text)

    def _one_pattern(self, pattern: str, path: LongPath) -> str:
        """A pattern of keys, of which the library takes one at a time."""
        try:
            parts = split_pattern(pattern)
        except ValueError as error:
            self._problem(path, str(error))
            return ANY_TEXT
        if len(parts) > 1:
            self._problem(path, "this look-around cannot be enforced")
        return parts[0]

    def _join(self, also: list[Any], schema: Schema | None, path: LongPath) -> None:
        """Require one more schema; None where it could not be said."""
        if schema is None:
            self._problem(path, "it cannot be enforced")
        elif schema is not True:
            also.append(self._schema(schema))

    def _bound(self, result: dict[str, Any], keyword: str, value: Any, path: LongPath) -> None:
        """A bound that the library takes, the next one inwards where it would round it or not know it."""
        upper = keyword.endswith("aximum")
        if abs(value) < EXACT or (abs(value) <= LARGEST and float(value) == value):
            result[keyword] = value
            return
        if upper == (value > 0):
            value = min(value, LARGEST) if upper else max(value, -LARGEST)
        if abs(value) > LARGEST:
            self._problem(path, f"expected at most {LARGEST} in size")
            return
        inwards = float(value)
        if inwards != value and (inwards > value) == upper:
            inwards = math.nextafter(inwards, -math.inf if upper else math.inf)
        result[keyword.replace("exclusiveM", "m") if inwards != value else keyword] = int(inwards)

    def _one_of(self, branches: list[Schema], path: LongPath) -> list[Any]:
        """Branches of which a value has at least one, so that it has no other: each excludes those that it may share
        values with."""
        if not branches:
            self._problem(path, "expected at least one schema")
            return [True]
        left = list[Schema]()
        for index, branch in enumerate(branches):
            others = [other for position, other in enumerate(branches) if position != index]
            excluded = [self._logic.excluding(branch, other) for other in others]
            joined = [
                branch_excluded
                for branch_excluded in excluded
                if branch_excluded is not None and branch_excluded is not True
            ]
            if None in excluded:
                left.clear()  # not all could be said
                break
            if not any(self._logic.disjoint(branch, branch_excluded) for branch_excluded in joined):
                left.append(Node(path, {"allOf": [branch, *joined]}) if joined else branch)
        if not left:
            self._problem(path, "an answer may be of several: expected anyOf, or schemas without a common value")
        return [self._schema(branch_excluded) for branch_excluded in left or branches]

    def _condition(self, node: Node, condition: Schema, also: list[Any], path: LongPath) -> None:
        then, other = node.get("then", True), node.get("else", True)
        if then is True and other is True:
            return
        negated = self._logic.negated(condition)
        if negated is None:
            self._problem(path, "its opposite cannot be enforced")
            return
        branches = [Node(path, {"allOf": [condition, then]}), Node(path, {"allOf": [negated, other]})]
        self._join(also, Node(path, {"anyOf": branches}), path)

    def _depends(self, name: str, schema: Schema, also: list[Any], path: LongPath) -> None:
        """Require a schema of objects that have a key."""
        if len(also) > MOST_BRANCHES.bit_length():
            self._problem(path, "it cannot be enforced beside so many others")  # branches multiply
            return
        without = Node(path, {"properties": {name: False}})
        having = Node(path, {"allOf": [Node(path, {"required": [name]}), schema]})
        self._join(also, Node(path, {"anyOf": [without, having]}), path)

    def _contains(self, node: Node, value: Schema, also: list[Any], path: LongPath) -> None:
        """Put the items that must be there first."""
        least = node.get("minContains", 1)
        if "maxContains" in node or "prefixItems" in node or least > MOST_BRANCHES:
            self._problem(path, "it cannot be enforced beside maxContains or prefixItems")
        elif least:
            first = Node(path, {"allOf": [node.get("items", True), value]})
            join = {"prefixItems": [first] * least, "items": node.get("items", True), "minItems": least}
            also.append(self._schema(Node(path, join)))

    def _unique(self, node: Node, also: list[Any], path: LongPath) -> None:
        """Require items that are all different: lists of few values are written out."""
        most = node.get("maxItems", MOST_BRANCHES)
        if most <= 1:
            return
        values: list[Any] = []
        listed = [part for part in self._logic.parts(node.get("items", True)) if "enum" in part]
        for value in listed[0]["enum"] if listed else ():
            if not any(same(value, other) for other in values):
                values.append(value)
        most = min(most, len(values))
        if not values or "prefixItems" in node or sum(math.perm(len(values), i) for i in range(most + 1)) > MOST_LISTS:
            self._problem(path, "items that are all different cannot be enforced")
            return
        lists = chain.from_iterable(permutations(values, count) for count in range(most + 1))
        branches = [{"type": "array", "enum": [[*items] for items in lists]}]
        others = [name for name in node.get("type", TYPES) if name != "array"]
        also.append({"anyOf": [*branches, {"type": others}] if others else branches})

    def _names(self, node: Node, value: Schema, result: dict[str, Any], also: list[Any], path: LongPath) -> None:
        """Require a schema of the keys of objects: by the keys that it lists, or by its pattern."""
        parts = [part for part in self._logic.parts(value) if part.keys() - {"allOf", "$ref", "type"}]
        declared = node.get("properties", {}).keys()
        types = [part["type"] for part in self._logic.parts(value) if "type" in part]
        if value is False or not all("string" in types_of_name for types_of_name in types):
            also.append({"properties": dict.fromkeys(declared, False), "additionalProperties": False})
            return
        if not parts:
            return
        rest = node.get("additionalProperties", True)
        listed = [part.get("enum", [part.get("const")]) for part in parts if "enum" in part or "const" in part]
        if listed and all(part.keys() <= {"enum", "const", "type", "allOf", "$ref"} for part in parts):
            names = [name for name in listed[0] if isinstance(name, str) and all(name in other for other in listed)]
            if "patternProperties" not in node:
                properties = {name: node.get("properties", {}).get(name, rest) for name in names}
                result.pop("properties", None)
                keep = {name: self._schema(properties[name]) for name in names}
                result["properties"] = keep | {name: False for name in declared if name not in names}
                result["additionalProperties"] = False
                return
        lengths = {"minLength", "maxLength"}
        simple = all(part.keys() <= {"pattern", "format", "type", "allOf", "$ref", *lengths} for part in parts)
        formats = [part["format"] for part in parts if part.get("format") in FORMATS]
        simple = simple and FORMATS_OF_KEYS.keys() >= {*formats}
        patterns = [part["pattern"] for part in parts if "pattern" in part]
        patterns += [FORMATS_OF_KEYS[name] for name in formats if name in FORMATS_OF_KEYS]
        for part in parts:
            if part.keys() & lengths:
                patterns.append(rf"^[\s\S]{{{part.get('minLength', 0)},{part.get('maxLength', '')}}}$")
        if not simple or len(patterns) > 1 or declared or "patternProperties" in node:
            self._problem(path, "it cannot be enforced: expected a list of keys, or one pattern without other keys")
        elif patterns:
            result.pop("additionalProperties", None)
            pattern = self._one_pattern(patterns[0], (*path, "pattern"))
            result["patternProperties"] = {pattern: self._schema(rest)}
            result["additionalProperties"] = False

    def _unevaluated(self, node: Node, value: Schema, also: list[Any], path: LongPath) -> None:
        if value is True or value == {}:
            return
        names = self._logic.evaluated(
            Node(node.path, {name: keyword_value for name, keyword_value in node.items() if name != path[-1]})
        )
        if names is None:
            self._problem(path, "it cannot be enforced beside schemas that may apply or not")
            return
        properties = dict.fromkeys(names, True)
        also.append(self._schema(Node(path, {"properties": properties, "additionalProperties": value})))

    def _count(
        self, node: Node, keyword: str, value: int, result: dict[str, Any], also: list[Any], path: LongPath
    ) -> None:
        """Bounds of the number of keys, which the library takes only where no listed key may be absent."""
        required = {*node.get("required", ())}
        optional = [
            name for name, schema in node.get("properties", {}).items() if name not in required and schema is not False
        ]
        closed = node.get("additionalProperties") is False and "patternProperties" not in node
        if keyword == "maxProperties":
            if closed and value >= len(required) + len(optional):
                return
            if not optional:
                result[keyword] = value
            elif closed and math.comb(len(optional), max(value - len(required), 0)) <= MOST_BRANCHES:
                kept = combinations(optional, max(value - len(required), 0))
                branches = [{"properties": {name: False for name in optional if name not in names}} for names in kept]
                also.append({"anyOf": branches})
            else:
                self._problem(path, "it cannot be enforced beside keys that may be absent")
            return
        missing = value - len(required)
        if missing <= 0:
            return
        if not optional and missing == 1:
            result[keyword] = value
        elif optional and missing <= len(optional) and math.comb(len(optional), missing) <= MOST_BRANCHES:
            also.append({"anyOf": [{"required": [*names]} for names in combinations(optional, missing)]})
        else:
            self._problem(path, "so many different keys cannot be enforced")


def _tighten(schemas: list[dict[str, Any]]) -> None:
    """Move exclusive whole bounds a step inwards. The library (1.9.1) takes one for inclusive where the opposite bound
    is less than 1 further from 0. The two may be joined from anywhere in the document, so each is compared with all
    opposite ones."""
    for near, far, sign in (("Minimum", "Maximum", 1), ("Maximum", "Minimum", -1)):
        bound, exclusive, opposite = near.lower(), f"exclusive{near}", (far.lower(), f"exclusive{far}")
        ends = sorted(sign * schema[name] for schema in schemas for name in opposite if name in schema)
        ends.append(math.inf)
        for schema in schemas:
            whole = sign * schema.get(exclusive, -sign)
            gap = ends[bisect_right(ends, whole)] - whole
            if whole >= 0 and whole == int(whole) and gap < 1:
                inwards = max(whole + gap * STEP, math.nextafter(whole, math.inf))
                del schema[exclusive]
                schema[bound] = sign * max(inwards, sign * schema.get(bound, sign * inwards))


def _is_finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_finite, value))
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)
