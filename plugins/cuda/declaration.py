"""The declaration of a kernel: arguments in order, sizes and grid. TensorRT, the CPU and the GPU launch it by these."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

PLUGINS = Path(__file__).resolve().parents[1]
NAMESPACE = "redraft"
DTYPES = ("bf16", "int32", "float32", "e4m3")
RESERVED_NAMES = {"outputs", "stream", "tactic"}
"""Names that tensorrt.plugin keeps for itself."""
ALIAS = "alias"
"""The attribute of a plugin that says whether its in-place outputs are declared as aliases."""
POINTER, INT32 = "pointer", "int32"
MOST_THREADS = 1024
"""Largest block, on every GPU."""
_PTX_TYPES = {"u64": POINTER, "b64": POINTER, "u32": INT32, "s32": INT32, "b32": INT32}


class Sizes(dict[str, Any]):
    """Sizes by name: integers or, while TensorRT builds, symbolic expressions, which `+`, `*` and `//` take on their
    left side only."""

    def least(self, a: Any, b: Any) -> Any:
        return min(a, b)

    def most(self, a: Any, b: Any) -> Any:
        return max(a, b)

    def quotient(self, a: Any, b: Any) -> Any:
        return a // b


class Entry(NamedTuple):
    """A kernel as its PTX has it: parameters in order, pointers and int32; the threads of a block that it is compiled
    for, None where any number fits."""

    parameters: list[str]
    threads: int | None


@dataclass(frozen=True)
class Argument:
    """A tensor: its shape names sizes; an in-place output names its input."""

    name: str
    dtype: str
    shape: tuple[str, ...]
    in_place_of: str | None = None


@dataclass(frozen=True)
class Kernel:
    """A CUDA kernel with arguments inputs, int32 scalars, outputs, and the TensorRT plugin that it is.

    `entry` names the function, with attributes in braces. Sizes are those that inputs' shapes name, the attributes
    (int) and, from these, `derived`; `scalars` and `grid` are names of sizes.
    """

    name: str
    source: Path
    entry: str
    attributes: tuple[str, ...]
    inputs: tuple[Argument, ...]
    scalars: tuple[str, ...]
    outputs: tuple[Argument, ...]
    grid: tuple[str, str, str]
    threads: int
    derived: Mapping[str, Callable[[Sizes], Any]] = field(default_factory=dict)

    @property
    def plugin_id(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    def entry_for(self, attributes: Mapping[str, int]) -> str:
        return self.entry.format(**attributes)

    def sizes(self, shapes: Iterable[Any], attributes: Mapping[str, int], kind: type[Sizes] = Sizes) -> Sizes:
        """All sizes, from the inputs' shapes in order. Raises ValueError for integers that contradict each
        other."""
        sizes = kind(attributes)
        for argument, shape in zip(self.inputs, shapes, strict=True):
            if len(shape) != len(argument.shape):
                raise ValueError(f"{self.name}: {argument.name} has {len(shape)} dimensions: expected {argument.shape}")
            for name, size in zip(argument.shape, shape, strict=True):
                size_before = sizes.setdefault(name, size)
                if isinstance(size_before, int) and isinstance(size, int) and size_before != size:
                    raise ValueError(f"{self.name}: {argument.name} has {name} {size}: expected {size_before}")
        for name, rule in self.derived.items():
            sizes[name] = rule(sizes)
        return sizes

    def parameters(self) -> list[str]:
        """What the entry takes, in order: pointers and int32."""
        return [POINTER] * len(self.inputs) + [INT32] * len(self.scalars) + [POINTER] * len(self.outputs)

    def check(self) -> None:
        """Raise ValueError where the declaration breaks a rule of tensorrt.plugin."""
        names = [*(argument.name for argument in self.inputs), *self.attributes, ALIAS]
        inputs = {argument.name: argument for argument in self.inputs}
        known = {size for argument in self.inputs for size in argument.shape} | {*self.attributes, *self.derived}
        if "." in self.name or not self.name.isidentifier():
            raise ValueError(f"name {self.name!r}: expected an identifier")
        if len(set(names)) < len(names) or RESERVED_NAMES & set(names):
            raise ValueError(f"{self.name}: inputs and attributes {names}: expected other names, each once")
        if not self.inputs or not self.outputs:
            raise ValueError(f"{self.name}: expected inputs and outputs")
        outputs = [output.name for output in self.outputs]
        if len({*outputs, *names}) < len(outputs) + len(names):
            raise ValueError(f"{self.name}: outputs {outputs}: expected other names than {names}, each once")
        aliased = [output.in_place_of for output in self.outputs if output.in_place_of]
        if len(set(aliased)) < len(aliased):
            raise ValueError(f"{self.name}: outputs in place of {aliased}: expected each input once")
        if not 0 < self.threads <= MOST_THREADS:
            raise ValueError(f"{self.name}: {self.threads} threads: expected 1 to {MOST_THREADS}")
        for argument in (*self.inputs, *self.outputs):
            if argument.dtype not in DTYPES:
                raise ValueError(f"{self.name}: {argument.name} is {argument.dtype}: expected one of {DTYPES}")
        for output in self.outputs:
            source = inputs.get(output.in_place_of or "")
            if output.in_place_of and (not source or (source.dtype, source.shape) != (output.dtype, output.shape)):
                raise ValueError(
                    f"{self.name}: {output.name} in place of {output.in_place_of}: expected an input like it"
                )
        used = {*self.scalars, *self.grid, *(size for output in self.outputs for size in output.shape)}
        if unknown := used - known:
            raise ValueError(f"{self.name}: sizes {sorted(unknown)}: expected some of {sorted(known)}")

    def check_ptx(self, ptx: str, attributes: Mapping[str, int]) -> None:
        """Raise ValueError where the PTX's entry takes other arguments or is compiled for other threads."""
        name, parameters = self.entry_for(attributes), entries(ptx)
        if name not in parameters:
            raise ValueError(f"{self.name}: {name} is not in the PTX: expected one of {sorted(parameters)}")
        entry = parameters[name]
        if entry.parameters != self.parameters():
            raise ValueError(f"{self.name}: {name} takes {entry.parameters}: expected {self.parameters()}")
        if entry.threads not in (None, self.threads):
            raise ValueError(
                f"{self.name}: {self.threads} threads: expected {entry.threads}, as {name} is compiled for"
            )


def entry_ptx(ptx: str, name: str) -> str:
    """A PTX text with one of its entries only. Raises ValueError for a name that it does not have."""
    header = ptx[: ptx.index(".visible .entry ")]
    match = re.search(rf"^\.visible \.entry {re.escape(name)}\(.*?^}}\n", ptx, re.DOTALL | re.MULTILINE)
    if not match:
        raise ValueError(f"{name} is not in the PTX: expected one of {sorted(entries(ptx))}")
    return header + match[0]


def entries(ptx: str) -> dict[str, Entry]:
    """Each `.entry` of a PTX text. Raises ValueError for parameters that are neither pointers nor int32.

    nvcc 13.0 marks pointers with `.ptr` for sm_100, but not for sm_80 and sm_90: there a 64-bit scalar passes as one.
    """
    marked = ".ptr" in ptx
    result = {}
    for name, text, directives in re.findall(r"\.entry\s+(\w+)\s*\((.*?)\)([^{;]*)", ptx, re.DOTALL):
        parameters = []
        for kind, pointer in re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s*(\.ptr)?", text):
            parameter = _PTX_TYPES.get(kind)
            if parameter is None or (marked and (parameter == POINTER) != bool(pointer)):
                raise ValueError(f"{name} takes .{kind}{pointer}: expected pointers and int32")
            parameters.append(parameter)
        limit = re.search(r"\.(?:maxntid|reqntid)\s+([\d, ]+)", directives)
        result[name] = Entry(parameters, prod(int(size) for size in limit[1].split(",")) if limit else None)
    return result
