"""What is rendered from the table of request fields: the type of `LLM`'s options, Triton's inputs, and three tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from redraft import options
from redraft.fields import RequestField, plain_type
from redraft.openai.schemas import GenerationBody
from redraft.request import FIELDS, INT32_MAX, V1_NAMES, GenerateRequest, SamplingConfig
from redraft.serving.triton.fields import ENSEMBLE, OTHER_TENSORS, TENSORRT_LLM, Contract
from redraft.serving.tritonserver import REPOSITORY

PARAMETERS = ("text", "input_ids", "max_tokens", "stream")
"""Fields that are parameters of `LLM`'s methods, not options."""
OPTIONS = '''"""The options of a request, as `LLM`'s methods take them.

Rendered from the table in redraft/request.py by `python -m studies.figures.site`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from redraft.request import Guide


class Options(TypedDict, total=False):
    """Options of a request, with the names and meaning of `GenerateRequest` and `SamplingConfig`.

    Without `temperature` decoding is greedy. Without `seed` one is drawn; `stats.seed` has it.
    """

'''
INPUTS = re.compile(r"(?<=input \[\n)(?:  .*\n)*", re.MULTILINE)


def files() -> dict[Path, str]:
    """Each file that is rendered, with its content."""
    rendered = {Path(options.__file__): options_module()}
    for model, contract in (("ensemble", ENSEMBLE), ("tensorrt_llm", TENSORRT_LLM)):
        path = REPOSITORY / model / "config.pbtxt"
        rendered[path] = INPUTS.sub(inputs(model, contract), path.read_text(encoding="utf-8"), count=1)
    return rendered


def options_module() -> str:
    """`redraft/options.py`."""
    fields = (*GenerateRequest.model_fields, *SamplingConfig.model_fields)
    entries = {field.name: field for field in FIELDS if field.name in fields and field.name not in PARAMETERS}
    return OPTIONS + "".join(f"    {name}: {_python(field.info.annotation)}\n" for name, field in entries.items())


def inputs(model: str, contract: Contract) -> str:
    """The inputs of a model's config.pbtxt, a line each; required ones first."""
    tensors = [(name, *field.tensor) for field in FIELDS for name in getattr(field, model)]
    tensors.sort(key=lambda tensor: tensor[0] not in contract.required)
    tensors += [(name, other.dtype, other.dims) for name, other in contract.others.items()]
    lines = [
        f'  {{ name: "{name}" data_type: TYPE_{dtype} dims: [ {dims} ]'
        f"{'' if name in contract.required else ' optional: true'} }}"
        for name, dtype, dims in tensors
    ]
    return ",\n".join(lines) + "\n"


def tables() -> dict[str, str]:
    """Each table as Markdown, by the name that pages use."""
    return {
        "request_fields": markdown(["field", "elsewhere", "tensor", "values", "default", "meaning"],
                                   _request_fields()),
        "other_tensors": markdown(["`ensemble`", "`tensorrt_llm`", "type", "rule", "meaning"], _other_tensors()),
        "v1_fields": markdown(["field", "values", "default", "meaning"], _v1_fields()),
    }  # fmt: skip


def _request_fields() -> Iterator[list[str]]:
    for field in FIELDS:
        dtype, dims = field.tensor
        tensor = dtype + (f"[{dims}]" if dims != "1" else "") if field.ensemble or field.tensorrt_llm else ""
        name = f"`{field.path.removeprefix('sampling.')}`"
        yield [name, _elsewhere(field), tensor, _values(field.bounds), _default(field.info), field.meaning]


def _elsewhere(field: RequestField) -> str:
    """The front ends that call a field otherwise than `LLM`, with their names, or do not have it."""
    front_ends: dict[str, tuple[str, ...]] = {"`/v1`": (field.v1,) if field.v1 else ()}
    if field.ensemble == field.tensorrt_llm:
        front_ends["Triton"] = field.ensemble
    else:
        front_ends |= {"`ensemble`": field.ensemble, "`tensorrt_llm`": field.tensorrt_llm}
    parts = [f"{end}: {_names(names) or 'no'}" for end, names in front_ends.items() if names != (field.name,)]
    return "; ".join(parts)


def _other_tensors() -> Iterator[list[str]]:
    for tensor in OTHER_TENSORS:
        dtype = tensor.dtype + (f"[{tensor.dims}]" if tensor.dims != "1" else "")
        yield [_names([tensor.ensemble]), _names([tensor.tensorrt_llm]), dtype, tensor.rule.value, tensor.meaning]


def _v1_fields() -> Iterator[list[str]]:
    """The fields of every endpoint that generates which `/v1` adds, or has other values or meanings for."""
    entries = {field.name: field for field in FIELDS if field.name in V1_NAMES}
    for name, info in GenerationBody.model_fields.items():
        field, entry = RequestField(name, info), entries.get(name)
        values, meaning = _values(field.bounds), field.meaning or (entry.meaning if entry else "")
        if entry is None or (values, meaning) != (_values(entry.bounds), entry.meaning):
            yield [f"`{V1_NAMES.get(name, name)}`", values, _default(info), meaning]


def _names(names: list[str] | tuple[str, ...]) -> str:
    """Names as code, the newest first."""
    return ", earlier ".join(f"`{name}`" for name in reversed(names) if name)


def _values(bounds: Mapping[str, float]) -> str:
    """What the values of a field with these bounds are."""
    least = bounds.get("ge", bounds.get("gt"))
    most = bounds.get("le", bounds.get("lt"))
    if "max_length" in bounds:
        return f"at most {bounds['max_length']}"
    if least is None:
        return ""
    if most is None or most == INT32_MAX:
        return f"greater than {least:g}" if "gt" in bounds else f"at least {least:g}"
    return f"{_number(least)} to {_number(most)}{' - 1' * ('lt' in bounds)}"


def _number(value: float) -> str:
    exponent = int(abs(value)).bit_length() - 1
    return f"{'-' * (value < 0)}2^{exponent}" if exponent > 32 else f"{value:g}"


def _default(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, int | float) else "none"


def _python(annotation: Any) -> str:
    """A type as a module spells it, without what annotates it."""
    plain = plain_type(annotation)
    if get_origin(plain) in (list, dict):
        text = f"{get_origin(plain).__name__}[{', '.join(map(_python, get_args(plain)))}]"
    elif get_origin(plain) is Literal:
        text = "str"
    else:
        text = str(plain.__name__)
    return f"{text} | None" if type(None) in get_args(annotation) else text


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
