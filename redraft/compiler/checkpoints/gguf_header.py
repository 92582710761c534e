"""The header of a GGUF file, held against the file's size before a reader allocates what it says.

Layout: magic, version, counts of tensors and fields; fields (name, type, value); tensors (name, dimensions, type,
offset from the end of the header). Texts and arrays begin with their length in 8 bytes.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import gguf
from gguf import GGUFValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SIZES = {
    **dict.fromkeys((GGUFValueType.UINT8, GGUFValueType.INT8, GGUFValueType.BOOL), 1),
    **dict.fromkeys((GGUFValueType.UINT16, GGUFValueType.INT16), 2),
    **dict.fromkeys((GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.FLOAT32), 4),
    **dict.fromkeys((GGUFValueType.UINT64, GGUFValueType.INT64, GGUFValueType.FLOAT64), 8),
}
"""Bytes of a field's value that is a number"""
MOST_ITEMS = 1 << 22
"""Items of all arrays together: the reader makes an object of each, and vocabularies have a third of it at most."""
MOST_DIMENSIONS = 4
MOST_FIELDS = MOST_TENSORS = 1 << 20


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

    def skip_text(self) -> None:
        self.skip(self.number("Q"))

    def skip_value(self, kind: GGUFValueType) -> None:
        if kind == GGUFValueType.STRING:
            self.skip_text()
        elif kind == GGUFValueType.ARRAY:
            item, count = GGUFValueType(self.number("I")), self.number("Q")
            self._items += count
            if item == GGUFValueType.ARRAY:
                raise ValueError("an array of arrays")
            if self._items > MOST_ITEMS:
                raise ValueError(f"an array of {count} items")
            if item == GGUFValueType.STRING:
                for _ in range(count):
                    self.skip_text()
            else:
                self.skip(count * SIZES[item])
        else:
            self.skip(SIZES[kind])

    def tensor_end(self) -> int:
        """Where the next tensor's data ends, counted from the end of the header."""
        self.skip_text()
        count = self.number("I")
        if not 1 <= count <= MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {count} dimensions")
        size = 1
        for _ in range(count):
            size *= self.number("Q")
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(self.number("I"))]
        offset = self.number("Q")
        if not 1 <= size <= len(self._data) * block:
            raise ValueError(f"a tensor of {size} numbers")
        return offset + size // block * block_bytes


def check(path: Path) -> None:
    """Raise ValueError, which says what, where the file does not hold what its header says."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        cursor.skip(len(MAGIC))
        if (version := cursor.number("I")) not in VERSIONS:
            raise ValueError(f"version {version}")
        tensors, fields = cursor.number("Q"), cursor.number("Q")
        if tensors > MOST_TENSORS or fields > MOST_FIELDS:
            raise ValueError(f"{tensors} tensors and {fields} fields")
        for _ in range(fields):
            cursor.skip_text()
            cursor.skip_value(GGUFValueType(cursor.number("I")))
        ends = [cursor.tensor_end() for _ in range(tensors)]
        cursor.skip(max(ends, default=0))
