"""The functions of `c_api.cpp`, called with arrays."""

from __future__ import annotations

import ctypes
import re
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from redraft.plugins.headers import HeaderError
from redraft.plugins.kernels import NO_BYTES, run
from redraft.plugins.library import kernels_path

RESULTS = {"void": None, "void*": ctypes.c_void_p, "int64_t": ctypes.c_int64, "const char*": ctypes.c_char_p}
DTYPES: dict[type[np.generic], np.dtype] = {
    kind: np.dtype(kind) for kind in (np.int32, np.int64, np.float32, np.float64)
}
SCALARS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}


def prepare() -> None:
    """Find all functions, so that what is missing ends a start instead of a step. Raises BuildError."""
    for name in _signatures():
        function(name)


@cache
def function(name: str) -> ctypes._NamedFuncPointer:
    """Return the function `redraft_<name>`, which takes arrays by `pointer`. Raises BuildError."""
    result, arguments = _signatures()[name]
    native = getattr(ctypes.CDLL(str(kernels_path())), f"redraft_{name}")
    native.restype, native.argtypes = RESULTS[result], arguments
    return native


def call(name: str, *arguments: Any) -> None:
    """Call a function that can fail. Raises ValueError with its message."""
    run(function(name), *arguments)


def pointer(array: np.ndarray, dtype: type[np.generic]) -> ctypes.Array | int:
    """Return what a function takes for a contiguous array of a dtype. Raises TypeError for any other array."""
    flags = array.flags
    if array.dtype != DTYPES[dtype] or not flags.c_contiguous:
        raise TypeError(f"{array.dtype} {array.shape}: expected contiguous {np.dtype(dtype)}")
    if not flags.writeable:
        return array.ctypes.data
    return NO_BYTES.from_buffer(array)  # type: ignore[arg-type]  # arrays say that they are buffers from Python 3.12 on


def address(numbers: array) -> ctypes.Array:
    """Return what a function takes for an array of Python's: of few numbers it is made and read in less time than
    numpy's, and needs no type for its length as those of ctypes do."""
    return NO_BYTES.from_buffer(numbers)


def zeros(kind: str, count: int) -> array:
    """Return an array of Python's for results."""
    return array(kind, (0,)) * count


@cache
def _signatures() -> dict[str, tuple[str, list[Any]]]:
    """Each function's result and the types of its arguments, read from the source that is compiled."""
    text = (Path(__file__).parent / "c_api.cpp").read_text(encoding="utf-8")
    functions = re.findall(r"^(void\*?|int64_t|const char\*) redraft_(\w+)\(([^)]*)\)", text, re.M)
    return {
        name: (result, [_type(name, argument) for argument in arguments.split(",")])
        for result, name, arguments in functions
    }


def _type(name: str, argument: str) -> Any:
    if "*" in argument:
        return ctypes.c_void_p
    kind = argument.split()[0]
    if kind not in SCALARS:
        raise HeaderError(f"plugins/trees/c_api.cpp: redraft_{name} has an argument that cannot be passed: {argument}")
    return SCALARS[kind]
