"""Weights in the order in which the CPU kernels stream them; README.md draws the layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from redraft.plugins.operators.linear.blocks import GROUP as BLOCK_GROUP
from redraft.plugins.operators.linear.blocks import HALF_PANEL, ROUNDED, BlockWeight

PANEL = 32
PRECISIONS = ("fp32", "bf16", *ROUNDED)
"""What float weights are packed in."""
GROUP = {"fp32": 1, "bf16": 2}
"""Features of a weight row that lie together."""
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
    if precision not in PRECISIONS:
        raise ValueError(f"precision '{precision}': expected one of {', '.join(PRECISIONS)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if weight.ndim != 2 or (activation in GATED and len(weight) % 2):
        raise ValueError(f"weight of shape {weight.shape}: expected two dimensions, the first even with {activation}")
    if precision in ROUNDED:
        return pack_blocks([BlockWeight.quantized(weight, precision)], activation)
    values = np.ascontiguousarray(weight, dtype=np.float32)
    if precision == "bf16":
        values = bf16_bits(values)
    halves = np.split(values, 2) if activation in GATED else [values]
    columns = PANEL // len(halves)
    panels = np.concatenate([_rows(half, columns) for half in halves], axis=1)  # [panels, 32, K]
    panels = np.pad(panels, ((0, 0), (0, 0), (0, -panels.shape[2] % GROUP[precision])))
    panels = panels.reshape(*panels.shape[:2], -1, GROUP[precision])
    return PackedWeight(np.ascontiguousarray(panels.swapaxes(1, 2)).reshape(-1).view(np.uint8), precision)


def pack_blocks(segments: Sequence[BlockWeight], activation: str = "none") -> PackedWeight:
    """Pack weights of one width, one below the other; its dtype says their forms and rows: `q4_k:1792,q6_k:256`.

    With a gated activation the first half of all rows is the gate's. Raises ValueError where widths differ, or where a
    segment does not end with a half-panel and is not the last (of a half).
    """
    widths = {segment.shape[1] for segment in segments}
    if len(widths) != 1:
        raise ValueError(f"segments of {sorted(widths)} features: expected one width")
    rows = sum(segment.shape[0] for segment in segments)
    ends = [rows // 2, rows] if activation in GATED else [rows]
    parts = list(_cut(segments, ends[0]))
    end = 0
    for part in parts:
        end += part.shape[0]
        if part.shape[0] % HALF_PANEL and end not in ends:
            raise ValueError(f"a segment of {part.shape[0]} rows: expected a multiple of {HALF_PANEL}")
    data = [half_panel_rows(part).reshape(-1) for part in parts]
    return PackedWeight(np.concatenate(data), ",".join(f"{part.form.name}:{part.shape[0]}" for part in parts))


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
    numbers = np.zeros((half_panels * HALF_PANEL, spans * each), part.dtype)
    numbers[: part.shape[0], : part.shape[1]] = part
    numbers = numbers.reshape(half_panels, HALF_PANEL, spans, each).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(numbers).reshape(half_panels, spans, -1).view(np.uint8)


def _by_unit(codes: np.ndarray, half_panels: int, groups: int, bits: int) -> np.ndarray:
    """uint8 [N, K] to uint8 [half-panels, groups, bytes]: units of four features, two to a byte unless these are of 8
    bits; then the bits beyond four."""
    padded = np.zeros((half_panels * HALF_PANEL, groups * BLOCK_GROUP), np.uint8)
    padded[: codes.shape[0], : codes.shape[1]] = codes
    units = padded.reshape(half_panels, HALF_PANEL, groups, 8, 4).transpose(0, 2, 3, 1, 4)
    units = np.ascontiguousarray(units).reshape(half_panels, groups, 8, 64)
    if bits == 8:
        return units.reshape(half_panels, groups, -1)
    packed: list[np.ndarray] = [units[:, :, ::2] & 15 | units[:, :, 1::2] << 4]
    high = units >> 4
    if bits == 5:
        packed.append(np.packbits(high, axis=2, bitorder="little"))
    if bits == 6:
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
        packed.append(np.bitwise_or.reduce(high.reshape(half_panels, groups, 2, 4, 64) << shifts, axis=3))
    return np.concatenate(packed, axis=2).reshape(half_panels, groups, -1)


def _cut(segments: Sequence[BlockWeight], at: int) -> Iterator[BlockWeight]:
    """The segments, the one that holds row `at` as two."""
    begin = 0
    for segment in segments:
        end = begin + segment.shape[0]
        if begin < at < end:
            yield segment.rows(slice(None, at - begin))
            yield segment.rows(slice(at - begin, None))
        else:
            yield segment
        begin = end


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
