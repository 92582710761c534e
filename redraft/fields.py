"""The entries of the table of request fields in `redraft.request`: names outside, tensor types, bounds and meaning.

`/v1`, the Triton models, `LLM` and the reference pages have a field because the table has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

_BOUNDS = ("ge", "gt", "le", "lt", "min_length", "max_length")
_DTYPES = {bool: "BOOL", int: "INT32", float: "FP32", str: "STRING"}


def entry(
    default: Any,
    meaning: str,
    *,
    v1: str | None = None,
    ensemble: str | None = None,
    tensorrt_llm: str | None = None,
    dtype: str | None = None,
    **constraints: Any,
) -> Any:
    """Declare a request field. `...` as the default makes it required; `constraints` are those of pydantic's `Field`.

    `v1` is its name in `/v1`. `ensemble` and `tensorrt_llm` are its tensors in the two Triton models that generate;
    several names of one field are separated by a space, the newest last. By default all are the field's own name, and
    `tensorrt_llm` is what `ensemble` is. An empty name means that the front end does not have the field. `dtype` is the
    tensor's type where the Python type does not tell it.
    """
    names = {"v1": v1, "ensemble": ensemble, "tensorrt_llm": tensorrt_llm, "dtype": dtype}
    return Field(default, description=meaning, json_schema_extra=dict(names), **constraints)


@dataclass(frozen=True)
class RequestField:
    """A field of the table. `path` is its place in the worker's request, such as `sampling.top_k`."""

    path: str
    info: FieldInfo

    @property
    def name(self) -> str:
        """What the request type and `LLM` call it."""
        return self.path.rpartition(".")[2]

    @property
    def meaning(self) -> str:
        """One or two sentences of Markdown."""
        return self.info.description or ""

    @property
    def v1(self) -> str:
        """Its name in `/v1`, empty where it has none of its own there."""
        name = self._extra["v1"]
        return self.name if name is None else name

    @property
    def ensemble(self) -> tuple[str, ...]:
        """Its tensors in the Triton model `ensemble`."""
        names = self._extra["ensemble"]
        return tuple((self.name if names is None else names).split())

    @property
    def tensorrt_llm(self) -> tuple[str, ...]:
        """Its tensors in the Triton model `tensorrt_llm`."""
        names = self._extra["tensorrt_llm"]
        return self.ensemble if names is None else tuple(names.split())

    @property
    def tensor(self) -> tuple[str, str]:
        """Triton's data type and dimensions of its tensors, without the batch dimension."""
        dtype, dims = tensor_of(self.info.annotation)
        return self._extra["dtype"] or dtype, dims

    @cached_property
    def bounds(self) -> dict[str, float]:
        """Its constraints by pydantic's names: `ge`, `gt`, `le`, `lt`, `min_length` and `max_length`."""
        metadata = [*_metadata(self.info.annotation), *self.info.metadata]
        return {name: getattr(part, name) for name in _BOUNDS for part in metadata if hasattr(part, name)}

    @property
    def _extra(self) -> dict[str, Any]:
        extra = self.info.json_schema_extra
        assert isinstance(extra, dict)
        return extra


def fields_of(model: type[BaseModel], parent: str = "") -> Iterator[RequestField]:
    """The fields of a model that have an entry, those of models inside it included."""
    for name, info in model.model_fields.items():
        if info.json_schema_extra is not None:
            yield RequestField(parent + name, info)
        inner = plain_type(info.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from fields_of(inner, f"{parent}{name}.")


def tensor_of(annotation: Any) -> tuple[str, str]:
    """Triton's data type and dimensions for values of a Python type."""
    plain = plain_type(annotation)
    if get_origin(plain) is list:
        dtype, dims = tensor_of(get_args(plain)[0])
        return dtype, "-1" if dims == "1" else f"2, {dims}"  # words of token ids: the ids, and where each word ends
    if get_origin(plain) is Literal:
        return "STRING", "1"
    return _DTYPES.get(plain, ""), "1"


def plain_type(annotation: Any) -> Any:
    """A type without what annotates it and without None."""
    if get_origin(annotation) is Annotated:
        return plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return plain_type(next(item for item in get_args(annotation) if item is not type(None)))
    return annotation


def _metadata(annotation: Any) -> Iterator[Any]:
    """What annotates a type, or the first of a union."""
    if get_origin(annotation) is Annotated:
        for part in get_args(annotation)[1:]:
            yield from part.metadata if isinstance(part, FieldInfo) else (part,)
    elif get_origin(annotation) in (Union, UnionType):
        yield from _metadata(get_args(annotation)[0])
