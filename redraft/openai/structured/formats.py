"""The format that a request wants its answer in: OpenAI's fields for it, and vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, ValidationError, model_validator

from redraft.openai.body import Body, Unserved
from redraft.openai.errors import ApiError
from redraft.request import Guide, GuideKind, describe

FormatType = Literal["text", "json_object", "json_schema"]


def _schema(value: Any) -> dict[str, Any] | str:
    if isinstance(value, dict | str):
        return value
    raise ValueError("expected a JSON schema or its text")


Schema = Annotated[dict[str, Any] | str, PlainValidator(_schema)]
"""A JSON schema, or its text."""


def guide_for(field: str, kind: GuideKind, text: str = "") -> Guide:
    """The guide that a field asks for. Raises ApiError where its text is none of the kind, or too long."""
    try:
        return Guide(kind=kind, text=text)
    except ValidationError as error:
        raise ApiError(f"{field}: {describe(error).removeprefix('text: ')}", field) from None


def schema_guide(field: str, schema: Schema) -> Guide:
    """JSON that a field's schema describes. Raises ApiError."""
    return guide_for(field, "json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def only_guide(guides: Mapping[str, Guide]) -> tuple[str, Guide] | None:
    """The one guide of a request and the field that asks for it. Raises ApiError where several fields ask for one."""
    if len(guides) > 1:
        raise ApiError(f"expected at most one of {' and '.join(guides)}", next(iter(guides)))
    return next(iter(guides.items()), None)


class JsonSchema(Body):
    """A JSON schema with a name for it. It is always kept to, with and without `strict`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`."""

    type: FormatType
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError(f"expected json_schema with the type json_schema only, got the type {self.type}")
        return self

    def guides(self, field: str) -> Iterator[tuple[str, Guide]]:
        """The guide that the field asks for, if it asks for one."""
        return _guides(field, self.type, self.json_schema.schema_ if self.json_schema else None)


class TextFormat(Body):
    """`text.format` of responses."""

    type: FormatType
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> Self:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise ValueError(f"expected schema with the type json_schema only, got the type {self.type}")
        return self

    def guides(self, field: str) -> Iterator[tuple[str, Guide]]:
        """The guide that the field asks for, if it asks for one."""
        return _guides(field, self.type, self.schema_)


def _guides(field: str, kind: FormatType, schema: Schema | None) -> Iterator[tuple[str, Guide]]:
    if schema is not None:
        yield field, schema_guide(field, schema)
    elif kind == "json_object":
        yield field, guide_for(field, "json")


class StructuredOutputs(Body):
    """`structured_outputs`: one of them."""

    UNSERVED: ClassVar[Unserved] = {
        "disable_additional_properties": ((), "a schema says itself what other properties it takes"),
        "disable_any_whitespace": ((), "the grammar says where white space may stand"),
        "structural_tag": ((), "expected json, regex, choice or grammar"),
        "whitespace_pattern": ((), "the grammar says where white space may stand"),
    }
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"backend", "disable_fallback"})

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def guides(self) -> Iterator[tuple[str, Guide]]:
        """Each guide that is asked for, by its field's name."""
        field = "structured_outputs"
        yield from vllm_guides(f"{field}.", self.json_, self.regex, self.choice, self.grammar)
        if self.json_object:
            yield f"{field}.json_object", guide_for(f"{field}.json_object", "json")


def vllm_guides(
    prefix: str, schema: Schema | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[tuple[str, Guide]]:
    """The guides of fields whose names begin with `prefix`."""
    if schema is not None:
        yield f"{prefix}json", schema_guide(f"{prefix}json", schema)
    if regex is not None:
        yield f"{prefix}regex", guide_for(f"{prefix}regex", "regex", regex)
    if choice is not None:
        yield f"{prefix}choice", guide_for(f"{prefix}choice", "choice", json.dumps(choice))
    if grammar is not None:
        yield f"{prefix}grammar", guide_for(f"{prefix}grammar", "grammar", grammar)
