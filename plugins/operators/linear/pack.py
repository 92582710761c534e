"""Weights in the order in which the CPU kernels stream them; README.md draws the layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from redraft.plugins.operators.linear.blocks import GROUP as BLOCK_GROUP
from redraft.plugins.operators.linear.blocks import (
    HALF_PANEL,
    ROUNDED,
    BlockRows,
    BlockWeight,
    Form,
    RoundedRows,
    block_form,
    same_order,
)

PANEL = 32
PRECISIONS = ("fp32", "bf16", *ROUNDED)
"""What float weights are packed in."""
GROUP = {"fp32": 1, "bf16": 2}
"""Features of a weight row that lie together."""
WIDTH = {"fp32": 4, "bf16": 2}
"""Bytes of a stored number."""
AT_ONCE = 1 << 20
"""Numbers of a weight in blocks that are packed at once: few enough for a core's cache."""
ACTIVATIONS = ("none", "swiglu", "silu", "silu_last", "geglu", "relu")
GATED = ("swiglu", "geglu")
"""An activated projection times a second one."""


class PackedWeight(NamedTuple):
    data: np.ndarray
    """uint8, one-dimensional"""
    dtype: str
    """What the operator's attribute says"""


def pack(weight: np.ndarray, precision: str, activation: str = "none") -> PackedWeight:
    """Pack float [N, K] for `Linear`, `LinearTopK` and `Embedding`; int8 and int4 are rounded to blocks.

    With a gated activation, weight is [2N, K]: N rows of the gate, then N of the up projection.
    Raises ValueError for an unknown precision or activation, or a weight that is not a matrix.
    """
    check_precision(precision)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if weight.ndim != 2 or (activation in GATED and len(weight) % 2):
        raise ValueError(f"weight of shape {weight.shape}: expected two dimensions, the first even with {activation}")
    if precision in ROUNDED:
        return pack_blocks([RoundedRows(weight, precision)], activation)
    values = np.ascontiguousarray(weight, dtype=np.float32)
    if precision == "bf16":
        values = bf16_bits(values)
    halves = np.split(values, 2) if activation in GATED else [values]
    columns = PANEL // len(halves)
    panels = np.concatenate([_rows(half, columns) for half in halves], axis=1)  # [panels, 32, K]
    panels = np.pad(panels, ((0, 0), (0, 0), (0, -panels.shape[2] % GROUP[precision])))
    panels = panels.reshape(*panels.shape[:2], -1, GROUP[precision])
    return PackedWeight(np.ascontiguousarray(panels.swapaxes(1, 2)).reshape(-1).view(np.uint8), precision)


def check_precision(precision: str) -> None:
    """Raise ValueError unless `pack` takes this precision."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision '{precision}': expected one of {', '.join(PRECISIONS)}")


def packed_bytes(shape: tuple[int, int], precision: str) -> int:
    """The size of what `pack` makes of a weight of this shape in fp32 or bf16."""
    rows, features = shape
    return -(-rows // PANEL) * PANEL * -(-features // GROUP[precision]) * GROUP[precision] * WIDTH[precision]


def pack_blocks(weights: Sequence[BlockRows], activation: str = "none") -> PackedWeight:
    """Pack weights of one width, one below the other; its dtype says their forms and rows: `q4_k:1792,q6_k:256`.

    With a gated activation the first half of all rows is the gate's. Some rows at a time are read. Raises ValueError
    where widths or the order of features differ, or where a weight does not end with a half-panel and is not the last
    (of a half).
    """
    segments, at = cut(weights, activation), 0
    data = np.empty(sum(segment.nbytes for segment in segments), np.uint8)
    for segment in segments:
        step = max(AT_ONCE // segment.weight.shape[1] // HALF_PANEL, 1) * HALF_PANEL
        for begin in range(segment.begin, segment.end, step):
            packed = half_panel_rows(segment.weight.rows(slice(begin, min(begin + step, segment.end)))).reshape(-1)
            data[at : at + len(packed)] = packed
            at += len(packed)
    return PackedWeight(data, dtype_of(segments))


class Segment(NamedTuple):
    """Rows of one form that are packed one after the other."""

    weight: BlockRows
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return block_bytes(self.weight.form, (self.end - self.begin, self.weight.shape[1]))


def cut(weights: Sequence[BlockRows], activation: str = "none") -> list[Segment]:
    """The segments that `pack_blocks` packs: one for each weight, two where it holds rows of both halves of a gated
    projection. Raises as `pack_blocks`."""
    widths = {weight.shape[1] for weight in weights}
    if len(widths) != 1:
        raise ValueError(f"segments of {sorted(widths)} features: expected one width")
    if not all(same_order(weights[0].feature_order, weight.feature_order) for weight in weights):
        raise ValueError("segments whose features are in several orders: expected one")
    bounds = [0, *accumulate(weight.shape[0] for weight in weights)]
    ends = [bounds[-1] // 2, bounds[-1]] if activation in GATED else bounds[-1:]
    segments = []
    for weight, (first, last) in zip(weights, pairwise(bounds), strict=True):
        marks = [first, *(end for end in ends if first < end < last), last]
        for begin, end in pairwise(marks):
            if (end - begin) % HALF_PANEL and end not in ends:
                raise ValueError(f"a segment of {end - begin} rows: expected a multiple of {HALF_PANEL}")
            segments.append(Segment(weight, begin - first, end - first))
    return segments


def dtype_of(segments: Sequence[Segment]) -> str:
    """The operator's `dtype` for segments: `q4_k:1792,q6_k:256`."""
    return ",".join(f"{segment.weight.form.name}:{segment.end - segment.begin}" for segment in segments)


def bytes_as(dtype: str, shape: tuple[int, int]) -> int:
    """The size of a packed weight of this shape, as an operator's `dtype` says that it is stored."""
    if ":" not in dtype:
        return packed_bytes(shape, dtype)
    segments = [part.split(":") for part in dtype.split(",")]
    return sum(block_bytes(block_form(name), (int(rows), shape[1])) for name, rows in segments)


def block_bytes(form: Form, shape: tuple[int, int]) -> int:
    """The size of so many rows and features, packed in one form."""
    return -(-shape[0] // HALF_PANEL) * half_panel_bytes(form, shape[1])


def half_panel_bytes(form: Form, features: int) -> int:
    """The size of a half-panel as `half_panel_rows` gives it."""
    groups, span = -(-features // BLOCK_GROUP), form.span // BLOCK_GROUP
    widths = {part.features: 0 for part in form.parts}
    for part in form.parts:
        widths[part.features] += np.dtype(part.dtype).itemsize
    of_span = widths.pop(form.span)
    of_group = sum(width * BLOCK_GROUP // size for size, width in widths.items()) + BLOCK_GROUP * form.bits // 8
    return HALF_PANEL * (-(-groups // span) * of_span + groups * of_group)


def half_panel_rows(weight: BlockWeight) -> np.ndarray:
    """Rows of one form as the kernels read them: uint8 [half-panels, bytes]."""
    form, (rows, features) = weight.form, weight.shape
    groups, count, span = -(-features // BLOCK_GROUP), -(-rows // HALF_PANEL), form.span // BLOCK_GROUP
    spans = -(-groups // span)
    sizes = {part.name: part.features for part in form.parts}
    header = [_by_row(weight.parts[name], count, spans, 1) for name, size in sizes.items() if size == form.span]
    steps = [
        _by_row(weight.parts[name], count, spans * span, BLOCK_GROUP // size)
        for name, size in sizes.items()
        if size < form.span
    ]
    codes = _by_unit(weight.codes, count, spans * span, form.bits)
    grouped = np.concatenate([*steps, codes], axis=-1).reshape(count, spans, -1)
    packed = np.concatenate([*header, grouped], axis=-1).reshape(count, -1)
    missing = (spans * span - groups) * (grouped.shape[-1] // span)
    return packed[:, : packed.shape[1] - missing]


def _by_row(part: np.ndarray, half_panels: int, spans: int, each: int) -> np.ndarray:
    """[N, at most spans * each] to uint8 [half-panels, spans, bytes]: of 16 rows the first number, then the next."""
    numbers = _padded(part, half_panels * HALF_PANEL, spans * each)
    numbers = numbers.reshape(half_panels, HALF_PANEL, spans, each).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(numbers).reshape(half_panels, spans, -1).view(np.uint8)


def _by_unit(codes: np.ndarray, half_panels: int, groups: int, bits: int) -> np.ndarray:
    """uint8 [N, K] to uint8 [half-panels, groups, bytes]: units of four features, two to a byte unless these are of 8
    bits; then the bits beyond four. A unit of a row is one word here, which numpy moves as fast as a byte."""
    words = _padded(codes, half_panels * HALF_PANEL, groups * BLOCK_GROUP).view(np.uint32)
    units = words.reshape(half_panels, HALF_PANEL, groups, 8)
    if bits < 8:
        low = units & np.uint32(0x0F0F0F0F) if bits > 4 else units
        packed = [low[..., ::2] | low[..., 1::2] << 4]
        high = units >> 4 & np.uint32(0x0F0F0F0F) if bits > 4 else units
        if bits == 5:
            packed.append(np.bitwise_or.reduce(high << np.arange(8, dtype=np.uint32), axis=-1, keepdims=True))
        if bits == 6:
            shifts = np.array([0, 2, 4, 6], np.uint32)
            packed.append(np.bitwise_or.reduce(high.reshape(*high.shape[:-1], 2, 4) << shifts, axis=-1))
        units = np.concatenate(packed, axis=-1)
    return np.ascontiguousarray(units.transpose(0, 2, 3, 1)).reshape(half_panels, groups, -1).view(np.uint8)


def _padded(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A contiguous matrix with zeros after its rows and columns."""
    if array.shape == (rows, columns):
        return np.ascontiguousarray(array)
    padded = np.zeros((rows, columns), array.dtype)
    padded[: array.shape[0], : array.shape[1]] = array
    return padded


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 to the uint16 bits of bf16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of bf16 to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rows(values: np.ndarray, columns: int) -> np.ndarray:
    """[N, K] to [ceil(N / columns), columns, K], zeros after the last row."""
    padded = np.pad(values, ((0, -len(values) % columns), (0, 0)))
    return padded.reshape(-1, columns, values.shape[1])
