"""The C++ headers, read from Python: the operators, and the kernels with the structures of their arguments."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

PLUGINS = Path(__file__).resolve().parent
SCALARS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float, "double": ctypes.c_double}


class HeaderError(RuntimeError):
    """A header and its reader, or a header and the compiled library, disagree."""


class Arguments(ctypes.Structure):
    """A structure of kernels.h, made from all of its fields by name. TypeError names those missing or unknown."""

    def __init__(self, **fields: Any) -> None:
        names = [name for name, *_ in self._fields_]
        for problem, wrong in (("missing", set(names) - set(fields)), ("unknown", set(fields) - set(names))):
            if wrong:
                raise TypeError(f"{type(self).__name__} of plugins/cpu/kernels.h: {problem} {', '.join(sorted(wrong))}")
        super().__init__(**fields)


@cache
def operators() -> tuple[str, ...]:
    """ONNX names of the operators that a network may hold, but for `Program`."""
    return tuple(name for (name,) in _entries("OPERATORS"))


@cache
def structures(folder: Path) -> dict[str, type[Arguments]]:
    """The structures that the kernels.h of `folder` defines, by name. Raises HeaderError for a field that ctypes has no
    type for."""
    text = (folder / "cpu" / "kernels.h").read_text()
    types: dict[str, Any] = SCALARS | dict.fromkeys(re.findall(r"^enum class (\w+) : int ", text, re.M), ctypes.c_int)
    result: dict[str, type[Arguments]] = {}
    for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.M | re.S):
        if name == "Kernels":  # pointers to functions, for C++ only
            continue
        fields = [_field(name, line, types) for line in body.splitlines() if line.split("//")[0].strip()]
        types[name] = result[name] = type(name, (Arguments,), {"_fields_": fields})
    return result


@cache
def kernel_arguments(folder: Path) -> dict[str, type[Arguments]]:
    """The structure that each kernel takes, by the kernel's name."""
    types = structures(folder)
    return {kernel: types[structure] for kernel, structure in _entries("KERNELS")}


def expect_sizes(library: ctypes.CDLL, arguments: dict[str, type[Arguments]]) -> None:
    """Raise HeaderError where the compiled library has another size for a kernel's arguments than `arguments`."""
    for kernel, structure in arguments.items():
        size = getattr(library, f"redraft_{kernel}_bytes")
        size.restype = ctypes.c_int64
        if size() != ctypes.sizeof(structure):
            raise HeaderError(
                f"{structure.__name__} has {size()} bytes in {Path(library._name).name} and {ctypes.sizeof(structure)} "
                f"in plugins/cpu/kernels.h: remove {Path(library._name).parent}, which is compiled again"
            )


def _entries(macro: str) -> list[tuple[str, ...]]:
    text = (PLUGINS / "operators" / "list.h").read_text()
    entries = re.search(rf"#define REDRAFT_{macro}\(X\)((?:.*\\\n)*.*)", text)
    assert entries, macro
    return [tuple(entry.split(", ")) for entry in re.findall(r"X\(([^)]+)\)", entries[1])]


def _field(structure: str, line: str, types: dict[str, Any]) -> tuple[str, Any]:
    match = re.match(r" *(?:const )?(\w+)(\*?) (\w+);", line)
    if not match or not (match[2] or match[1] in types):
        raise HeaderError(f"plugins/cpu/kernels.h: {structure} has a field that plugins/headers.py cannot read: {line}")
    kind, pointer, name = match.groups()
    return name, ctypes.c_void_p if pointer else types[kind]
