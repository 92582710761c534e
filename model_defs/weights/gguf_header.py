"""The header of a GGUF file: its fields and tensors. What it says is held against the file's size before it is read.

Layout: magic, version, counts of tensors and fields; fields (name, type, value); tensors (name, dimensions, type,
offset from the end of the header). Texts and arrays begin with their length in 8 bytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from redraft.model_defs.files import unreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = {
    **{GGUFValueType.UINT8: "u1", GGUFValueType.INT8: "i1", GGUFValueType.BOOL: "?"},
    **{GGUFValueType.UINT16: "<u2", GGUFValueType.INT16: "<i2"},
    **{GGUFValueType.UINT32: "<u4", GGUFValueType.INT32: "<i4", GGUFValueType.FLOAT32: "<f4"},
    **{GGUFValueType.UINT64: "<u8", GGUFValueType.INT64: "<i8", GGUFValueType.FLOAT64: "<f8"},
}
"""Types of a field's value that are a number, as numpy calls them"""
OTHER_TYPES = {
    **{4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}
"""Types of tensors that llama.cpp has given up, by their numbers"""
LENGTH_BYTES = 8
"""Bytes that say how long a text is"""
MOST_ITEMS = 1 << 22
"""Items of all arrays together: each becomes an object, and vocabularies have a third of it at most."""
MOST_DIMENSIONS = 4
MOST_FIELDS = MOST_TENSORS = 1 << 20
ALIGNMENT, USUAL_ALIGNMENT = "general.alignment", 32
"""The field that says of what the tensors' places are multiples, and what they are without it"""


class GgufTensor(NamedTuple):
    """Where a file has a tensor."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    """Bytes from the beginning of the file"""

    @property
    def row_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    def mapped(self, path: Path) -> np.ndarray:
        """The file's own bytes, uint8 [..., bytes of a row]. Pages that were read go with the array."""
        return np.memmap(path, np.uint8, "r", self.offset, (*self.shape[:-1], self.row_bytes))


class _Cursor:
    """A place in a file. Its methods raise ValueError instead of going beyond the end."""

    def __init__(self, data: mmap.mmap):
        self._data, self._at, self._items = data, 0, 0

    def skip(self, count: int) -> int:
        """Where the next `count` bytes begin, which are passed."""
        begin = self._at
        if count > len(self._data) - begin:
            raise ValueError(f"{count} bytes after byte {begin}")
        self._at += count
        return begin

    def number(self, form: str) -> int:
        """The next number, as `struct` calls its form."""
        (value,) = struct.unpack_from("<" + form, self._data, self.skip(struct.calcsize(form)))
        return int(value)

    def texts(self, count: int) -> list[str]:
        """The next texts."""
        texts, data, at = [], self._data, self._at
        for _ in range(count):  # vocabularies and merges have hundreds of thousands
            begin = at + LENGTH_BYTES
            at = begin + int.from_bytes(data[at:begin], "little")
            if at > len(data):
                raise ValueError(f"a text that ends at byte {at}")
            texts.append(data[begin:at].decode())
        self._at = at
        return texts

    def text(self) -> str:
        """The next text."""
        return self.texts(1)[0]

    def value(self, kind: GGUFValueType) -> Any:
        """The next value of a field: a text, a number, or a list of them."""
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind != GGUFValueType.ARRAY:
            return self.numbers(kind, 1)[0]
        item, count = GGUFValueType(self.number("I")), self.number("Q")
        self._items += count
        if item == GGUFValueType.ARRAY:
            raise ValueError("an array of arrays")
        if self._items > MOST_ITEMS:
            raise ValueError(f"an array of {count} items")
        return self.texts(count) if item == GGUFValueType.STRING else self.numbers(item, count)

    def numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        """The next numbers of one type."""
        dtype = np.dtype(NUMBERS[kind])
        return np.frombuffer(self._data, dtype, count, self.skip(count * dtype.itemsize)).tolist()

    def tensor(self) -> tuple[str, GgufTensor]:
        """The next tensor, its offset counted from the first one's place."""
        name, count = self.text(), self.number("I")
        if not 1 <= count <= MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {count} dimensions")
        shape = tuple(self.number("Q") for _ in range(count))[::-1]
        if (kind := self.number("I")) in OTHER_TYPES:
            raise UnreadTypeError(name, OTHER_TYPES[kind])
        tensor = GgufTensor(shape, GGMLQuantizationType(kind), self.number("Q"))
        block, _ = gguf.GGML_QUANT_SIZES[tensor.type]
        if not 1 <= math.prod(shape) <= len(self._data) * block:
            raise ValueError(f"a tensor of {math.prod(shape)} numbers")
        if shape[-1] % block:
            raise ValueError(f"{name} has rows of {shape[-1]} numbers, which are no blocks of {block}")
        return name, tensor


class UnreadTypeError(Exception):
    """A tensor, by its name, is of one of OTHER_TYPES."""


def unread(path: Path, name: str, kind: str) -> ValueError:
    """The error for a tensor of a type that is not read."""
    return ValueError(f"{path}: {name} is {kind}, which is not read; take the model as Q8_0 or Q4_K_M")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what a reader of a damaged file raises into a ValueError that names the file."""
    try:
        yield
    except UnreadTypeError as error:
        raise unread(path, *error.args) from None
    except (ValueError, LookupError, ArithmeticError, TypeError) as error:
        raise ValueError(_why_unreadable(path, error)) from error


class Header(NamedTuple):
    """What a file says of itself."""

    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]
    """Tensors by their names in the file"""


def read_header(path: Path) -> Header:
    """Raises ValueError, which names the file, where it does not hold what its header says."""
    with reading(path), path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        cursor.skip(len(MAGIC))
        if (version := cursor.number("I")) not in VERSIONS:
            raise ValueError(f"version {version}")
        tensor_count, field_count = cursor.number("Q"), cursor.number("Q")
        if tensor_count > MOST_TENSORS or field_count > MOST_FIELDS:
            raise ValueError(f"{tensor_count} tensors and {field_count} fields")
        fields = {cursor.text(): cursor.value(GGUFValueType(cursor.number("I"))) for _ in range(field_count)}
        tensors = dict(cursor.tensor() for _ in range(tensor_count))
        if len(tensors) < tensor_count:
            raise ValueError("two tensors of one name")
        alignment = fields.get(ALIGNMENT, USUAL_ALIGNMENT)
        begin = -(-cursor.skip(0) // alignment) * alignment
        placed = {name: tensor._replace(offset=begin + tensor.offset) for name, tensor in tensors.items()}
        if (end := max((tensor.offset + tensor.nbytes for tensor in placed.values()), default=0)) > len(data):
            raise ValueError(f"tensors of {end} bytes")
        return Header(fields, placed)


def _why_unreadable(path: Path, error: Exception) -> str:
    """Why a file could not be read as far as its header says."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return unreadable(path, f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    return (
        f"{path} is cut or damaged, or of an unknown version: its {path.stat().st_size} bytes do not hold what its "
        f"header says ({error}); fetch the file again"
    )
