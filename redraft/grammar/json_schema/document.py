"""A schema document as it was sent: checked, its references resolved, and written as one draft.

What is left has the keywords of draft 2020-12 that constrain an answer, in their order. Annotations, unknown keywords
and nulls are gone. A reference names one of the document's definitions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT3, DRAFT4, DRAFT6, DRAFT7, DRAFT202012, specification_with

from redraft.errors import place
from redraft.request import clipped, shown

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_WORK = 20_000
"""Steps that the schemas of one request may take: for a document, what the library itself takes at most."""
REFERENCE = "#/$defs/"
LongPath = tuple[int | str, ...]


class SchemaError(ValueError):
    """A schema that is none, or that cannot be enforced. The message names the keyword by its path."""


class Work:
    """Steps taken for the schemas of one request: one each time that a schema is looked at."""

    def __init__(self) -> None:
        self._steps = 0

    def spend(self, steps: int = 1) -> None:
        """Count steps. Raises SchemaError where they are too many."""
        self._steps += steps
        if self._steps > MAX_WORK:
            raise SchemaError(f"it is too large: expected one that {MAX_WORK} steps can rewrite")


class Node(dict[str, Any]):
    """A schema's keywords, and its path in the document that was sent."""

    def __init__(self, path: LongPath, keywords: dict[str, Any] | None = None):
        super().__init__(keywords or {})
        self.path = path


Schema = Node | bool


class Document:
    """A schema and its definitions. `problems` are the keywords that could not be read, each with what was expected;
    the schemas are without them."""

    def __init__(self, schema: dict[str, Any], work: Work):
        self.spend = work.spend
        self.spend()  # fails before the schema is crawled where no steps are left
        self.problems: list[str] = []
        self.definitions: dict[str, Schema] = {}
        """The definitions that the schema reaches, by name."""
        self._names: dict[int, str] = {}
        specification = _specification(schema, DRAFT202012)
        resource = specification.create_resource(schema)
        registry = Registry().with_resource(resource.id() or "", resource)
        try:
            registry = registry.crawl()
        except Exception:  # of a keyword that is malformed: reading it says which
            registry = Registry().with_resource(resource.id() or "", resource)
        self._static = len(registry) == 1
        """Whether a dynamic reference has one target, whatever refers to its schema."""
        self._pending: list[tuple[str, Any, Any, Any, LongPath]] = []
        self.root = self._read(schema, registry.resolver(resource.id() or ""), specification, ())
        while self._pending:
            name, *target = self._pending.pop()
            self.definitions[name] = self._read(*target)

    def problem(self, path: LongPath, text: str) -> None:
        """Note a keyword that cannot be read or enforced."""
        self.problems.append(f"{clipped(place(path), 120)}: {text}" if path else text)

    def target(self, node: Node) -> Schema:
        """The definition that a node refers to."""
        return self.definitions[node["$ref"]]

    def _read(self, schema: Any, resolver: Any, specification: Any, path: LongPath) -> Schema:
        self.spend()
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.problem(path, f"expected a schema, got {shown(schema)}")
            return True
        if path and isinstance(schema.get("$id", schema.get("id")), str):
            specification = _specification(schema, specification)
            resolver = resolver.in_subresource(specification.create_resource(schema))
        if "$ref" in schema and specification in (DRAFT3, DRAFT4, DRAFT6, DRAFT7):
            schema = {"$ref": schema["$ref"]}  # these drafts ignore what stands beside it

        def read(value: Any, *below: int | str) -> Schema:
            return self._read(value, resolver, specification, (*path, *below))

        result = Node(path)
        for keyword, value in schema.items():
            if value is None and keyword != "const":
                continue
            if keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
                read_keyword: Iterator[tuple[str, Any]] = self._reference(
                    keyword, value, resolver, specification, (*path, keyword)
                )
            else:
                read_keyword = self._keyword(keyword, value, schema, read, (*path, keyword))
            for name, read_value in read_keyword:
                result[name] = read_value
        return result

    def _keyword(
        self, keyword: str, value: Any, schema: dict[str, Any], read: Callable[..., Schema], path: LongPath
    ) -> Iterator[tuple[str, Any]]:
        """What a keyword is in draft 2020-12; nothing where it constrains nothing, or is malformed."""
        expected = ""
        match keyword:
            case "type":
                types = value if isinstance(value, list) else [value]
                if types and _are_names(types) and set(types) <= set(TYPES):
                    yield "type", types
                else:
                    expected = f"one of {', '.join(TYPES)}, or a list of them"
            case "const":
                yield "const", value
            case "enum":
                if isinstance(value, list):
                    yield "enum", value
                else:
                    expected = "a list of values"
            case "pattern" | "format":
                if isinstance(value, str):
                    yield keyword, value
                else:
                    expected = "a text"
            case (
                "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties"
                | "minContains" | "maxContains"
            ):  # fmt: skip
                if _is_number(value) and value >= 0 and value == int(value):
                    yield keyword, int(value)
                else:
                    expected = "a count"
            case "exclusiveMinimum" | "exclusiveMaximum" if isinstance(value, bool):
                bound = "minimum" if keyword == "exclusiveMinimum" else "maximum"
                if value and _is_number(schema.get(bound)):
                    yield keyword, schema[bound]
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                if _is_number(value):
                    yield keyword, value
                else:
                    expected = "a finite number"
            case "multipleOf":
                if _is_number(value) and value > 0:
                    yield keyword, value
                else:
                    expected = "a number above 0"
            case "uniqueItems":
                if not isinstance(value, bool):
                    expected = "true or false"
                elif value:
                    yield keyword, value
            case "required":
                if not _are_names(value):
                    expected = "a list of names"
                elif value:
                    yield keyword, list(dict.fromkeys(value))
            case "allOf" | "anyOf" | "oneOf" | "prefixItems":
                if isinstance(value, list):
                    yield keyword, [read(subschema, keyword, index) for index, subschema in enumerate(value)]
                else:
                    expected = "a list of schemas"
            case "items" if isinstance(value, list):
                yield "prefixItems", [read(subschema, keyword, index) for index, subschema in enumerate(value)]
            case "additionalItems":
                if isinstance(schema.get("items"), list):
                    yield "items", read(value, keyword)
            case "items" | "additionalProperties" | "contains" | "propertyNames" | "not" | "if" | "then" | "else":
                yield keyword, read(value, keyword)
            case "unevaluatedItems" | "unevaluatedProperties":
                yield keyword, read(value, keyword)
            case "properties" | "patternProperties" | "dependentSchemas":
                if isinstance(value, dict):
                    yield keyword, {name: read(subschema, keyword, name) for name, subschema in value.items()}
                else:
                    expected = "an object of schemas"
            case "dependentRequired":
                if isinstance(value, dict) and all(map(_are_names, value.values())):
                    yield keyword, value
                else:
                    expected = "an object of lists of names"
            case "dependencies":
                if isinstance(value, dict):
                    lists = {name: subschema for name, subschema in value.items() if _are_names(subschema)}
                    yield "dependentRequired", lists
                    others = {
                        name: read(subschema, keyword, name) for name, subschema in value.items() if name not in lists
                    }
                    yield "dependentSchemas", others
                else:
                    expected = "an object of schemas, or of lists of names"
        if expected:
            self.problem(path, f"expected {expected}, got {shown(value)}")

    def _reference(
        self, keyword: str, value: Any, resolver: Any, specification: Any, path: LongPath
    ) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, str):
            self.problem(path, f"expected a text, got {shown(value)}")
            return
        if keyword != "$ref" and not self._static:
            self.problem(path, "it cannot be enforced beside schemas with an $id")
            return
        try:
            resolved = resolver.lookup(value)
        except (Unresolvable, ValueError, LookupError, TypeError, AttributeError):
            self.problem(path, f"expected a reference within the schema, got {shown(value)}")
            return
        if isinstance(resolved.contents, bool):
            if not resolved.contents:
                yield "not", True
            return
        name = self._names.get(id(resolved.contents))
        if name is None:
            name = self._name(value)
            self._names[id(resolved.contents)] = name
            target: LongPath = tuple(part for part in re.split(r"[#/]", value) if part)
            self.definitions[name] = True
            self._pending.append((name, resolved.contents, resolved.resolver, specification, target))
        yield "$ref", name

    def _name(self, reference: str) -> str:
        """A new definition's name: the last part of the first reference to it, which messages of the library show."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", reference.rsplit("/", 1)[-1]).strip("_") or "root"
        return f"{name}:{len(self.definitions)}" if name in self.definitions else name


def _specification(schema: dict[str, Any], default: Any) -> Any:
    dialect = schema.get("$schema")
    return specification_with(dialect, default=default) if isinstance(dialect, str) else default


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
