"""The library of CPU kernels: its settings, failures and ranks, and calls of a kernel without OpenVINO."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref
from functools import cache
from typing import Any

import numpy as np

from redraft.plugins.headers import PLUGINS, Arguments, expect_sizes, kernel_arguments
from redraft.plugins.library import kernels_path

NO_BYTES = ctypes.c_char * 0
"""A view of a buffer, which takes a fifth of the time of an array's `ctypes.data`."""


@cache
def library() -> ctypes.CDLL:
    """The library with its functions declared; each returns None or an error message."""
    lib = ctypes.CDLL(str(kernels_path()))
    expect_sizes(lib, kernel_arguments(PLUGINS))
    for kernel, structure in kernel_arguments(PLUGINS).items():
        function = getattr(lib, f"redraft_{kernel}")
        function.argtypes, function.restype = [POINTER(structure)], ctypes.c_char_p
    for name in ("set_threads", "select_isa", "isa", "take_failure", "connect_ranks", "all_reduce"):
        getattr(lib, f"redraft_{name}").restype = ctypes.c_char_p
    lib.redraft_all_reduce.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    lib.redraft_take_exchange_seconds.restype = ctypes.c_double
    return lib


def set_threads(count: int) -> None:
    """Threads that the operators use, the calling one included."""
    run(library().redraft_set_threads, count)


def threads() -> int:
    return library().redraft_threads()


def select_isa(name: str | None) -> None:
    """avx2, avxvnni, avx512, avx512vnni, avx512bf16, amx, or None for the best; ValueError if the machine lacks it."""
    run(library().redraft_select_isa, name.encode() if name else None)


def isa() -> str:
    return library().redraft_isa().decode()


def take_failure() -> str | None:
    """The last error of an operator inside an OpenVINO network since the call before, which OpenVINO may have lost."""
    message = library().redraft_take_failure()
    return message.decode() if message else None


def connect_ranks(iallgather: int, test: int, communicator: int, float_type: int, count: int) -> None:
    """Sum over the ranks of an MPI communicator: addresses of two of its library's functions, and handles."""
    words = (ctypes.c_uint64(value & 0xFFFF_FFFF_FFFF_FFFF) for value in (iallgather, test, communicator, float_type))
    run(library().redraft_connect_ranks, *words, count)


def all_reduce(x: np.ndarray) -> np.ndarray:
    """The sum of all connected ranks' float32 arrays of this shape, which each must give; see all_reduce/README.md."""
    out = np.empty_like(x)
    run(library().redraft_all_reduce, address(x), x.size, address(out))
    return out


def ranks() -> int:
    """Ranks that are connected, this one included."""
    return library().redraft_ranks()


def take_exchange_seconds() -> float:
    """Seconds in exchanges between ranks, waiting for each other included, since the call before."""
    return library().redraft_take_exchange_seconds()


def call(kernel: str, **fields: Any) -> None:
    """Run a kernel with these fields of its arguments, whose arrays are passed by address."""
    run(getattr(library(), f"redraft_{kernel}"), byref(filled(kernel_arguments(PLUGINS)[kernel], **fields)))


def filled(structure: type[Arguments], **fields: Any) -> Arguments:
    """A structure with these fields, in which an array is its address."""
    addresses = {name: address(value) for name, value in fields.items() if isinstance(value, np.ndarray)}
    return structure(**fields | addresses)


def address(array: np.ndarray) -> int:
    """The address of a contiguous array. Raises TypeError for any other."""
    if not array.flags.c_contiguous or array.dtype not in (np.float32, np.int32, np.uint16, np.uint8, np.int8):
        raise TypeError(f"{array.dtype} {array.shape}: expected contiguous float32, int32, uint16, uint8 or int8")
    return data_of(array)


def data_of(array: np.ndarray) -> int:
    """Where a contiguous array's numbers are."""
    if not array.flags.writeable:
        return array.ctypes.data
    return ctypes.addressof(NO_BYTES.from_buffer(array))  # type: ignore[arg-type]  # arrays say so from Python 3.12 on


def run(function: ctypes._NamedFuncPointer, *arguments: object) -> None:
    """Call a function of the library. Raises ValueError with its message, if it returns one."""
    if message := function(*arguments):
        raise ValueError(message.decode())
