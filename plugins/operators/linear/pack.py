"""Weights in the order in which the CPU kernels stream them; README.md draws the layout."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PANEL = 32
DTYPES = ("fp32", "bf16", "int8", "w8a8")
GROUP = {"fp32": 1, "bf16": 2, "int8": 2, "w8a8": 4}
"""Features of a weight row that lie together."""
W8A8_SIGN = np.uint8(128)
"""Weights that meet int8 rows are unsigned, 128 greater: so the processors' products want them."""
ACTIVATIONS = ("none", "swiglu", "silu", "silu_last", "geglu", "relu")
GATED = ("swiglu", "geglu")
"""An activated projection times a second one."""


class PackedWeight(NamedTuple):
    data: np.ndarray
    """uint8, one-dimensional"""
    scale: np.ndarray | None
    """int8 and w8a8 only: float32 [weight rows]"""


def pack(weight: np.ndarray, dtype: str, activation: str = "none") -> PackedWeight:
    """Pack float [N, K] for `Linear`, `LinearTopK` and `Embedding`.

    With a gated activation, weight is [2N, K]: N rows of the gate, then N of the up projection.
    Raises ValueError for an unknown dtype or activation, or a weight that is not a matrix.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if weight.ndim != 2 or (activation in GATED and len(weight) % 2):
        raise ValueError(f"weight of shape {weight.shape}: expected two dimensions, the first even with {activation}")
    values, scale = np.ascontiguousarray(weight, dtype=np.float32), None
    if dtype == "bf16":
        values = bf16_bits(values)
    elif dtype in ("int8", "w8a8"):
        scale = np.maximum(np.abs(values).max(axis=1), np.finfo(np.float32).tiny) / np.float32(127)
        values = np.rint(values / scale[:, None]).clip(-127, 127).astype(np.int8)
    halves = np.split(values, 2) if activation in GATED else [values]
    columns = PANEL // len(halves)
    panels = np.concatenate([_rows(half, columns) for half in halves], axis=1)  # [panels, 32, K]
    panels = np.pad(panels, ((0, 0), (0, 0), (0, -panels.shape[2] % GROUP[dtype])))
    panels = panels.reshape(*panels.shape[:2], -1, GROUP[dtype])
    packed = np.ascontiguousarray(panels.swapaxes(1, 2)).reshape(-1).view(np.uint8)
    return PackedWeight(packed ^ W8A8_SIGN if dtype == "w8a8" else packed, scale)


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
