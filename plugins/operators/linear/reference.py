"""The reference of `Linear` in float64 numpy over weights rounded as they are stored."""

from __future__ import annotations

import numpy as np

from redraft.plugins.operators.linear.blocks import GROUP, ROUNDED, BlockWeight
from redraft.plugins.operators.linear.pack import GATED, bf16_bits, from_bf16_bits
from redraft.plugins.operators.norm.reference import norm as normalized


def linear(
    x: np.ndarray,
    weight: np.ndarray,
    precision: str = "fp32",
    *,
    bias: np.ndarray | None = None,
    norm: np.ndarray | None = None,
    norm_bias: np.ndarray | None = None,
    norm_eps: float = 1e-5,
    residual: np.ndarray | None = None,
    residual_rows: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    activation: str = "none",
) -> np.ndarray:
    """x float [T, K], weight float [N, K] (gated: [2N, K]); returns float64 [T or R, N]. Of `int8` and
    `int4` x is rounded in groups too, as the kernels do it."""
    x = np.asarray(x, np.float64)
    if rows is not None:
        x = x[rows]
    if norm is not None:
        x = normalized(x, norm, norm_eps, norm_bias)
    if precision == "bf16":
        x = from_bf16_bits(bf16_bits(x.astype(np.float32))).astype(np.float64)
    if precision in ROUNDED:
        y = block_product(x.astype(np.float32), BlockWeight.quantized(weight, precision)).astype(np.float64)
    else:
        y = x @ stored(weight, precision).T.astype(np.float64)
    if bias is not None:
        y = y + bias
    if activation in GATED:
        gate, up = np.split(y, 2, axis=-1)
        y = (silu(gate) if activation == "swiglu" else gelu(gate)) * up
    elif activation == "silu":
        y = silu(y)
    elif activation == "relu":
        y = np.maximum(y, 0)
    if residual is not None:
        y = y + (residual if residual_rows is None else residual[residual_rows])
    return silu(y) if activation == "silu_last" else y


def gelu(x: np.ndarray) -> np.ndarray:
    """The tanh approximation."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def stored(weight: np.ndarray, precision: str) -> np.ndarray:
    """The weights that the kernel multiplies with, as float32."""
    if precision in ROUNDED:
        return BlockWeight.quantized(weight, precision).dequantized()
    if precision == "bf16":
        return from_bf16_bits(bf16_bits(weight))
    return np.asarray(weight, np.float32)


def block_product(x: np.ndarray, weight: BlockWeight) -> np.ndarray:
    """x float32 [T, K] times weight [N, K] in blocks, to float32 [T, N]: bit for bit what the kernels compute.

    README.md has the order. Sums of integers are exact here too, as float32 numbers below 2^24.
    """
    form, (rows, features) = weight.form, weight.shape
    groups = -(-features // GROUP)
    size = min(GROUP, form.parts[-1].features)  # features of a group that share a scale
    parts = GROUP // size
    padding = ((0, 0), (0, groups * GROUP - features))
    grouped = np.pad(x.astype(np.float32), padding).reshape(len(x), groups, GROUP)
    top = np.maximum(np.abs(grouped).max(-1), np.float32(1e-30))
    codes = np.rint(grouped * (np.float32(127) / top)[..., None]).reshape(len(x), -1, size)
    stored = np.pad(weight.codes.astype(np.float32), padding).reshape(rows, -1, size)
    scale, minimum, zero = (weight.factor(name, size) for name in ("scale", "minimum", "zero"))
    assert scale is not None
    out = np.zeros((len(x), rows), np.float32)
    for group in range(groups):
        for i in range(group * parts, min((group + 1) * parts, scale.shape[1])):
            dot, total = codes[:, i] @ stored[:, i].T, codes[:, i].sum(-1, keepdims=True)
            if minimum is not None:
                value = fused(scale[:, i], dot, minimum[:, i] * total)
            else:
                exact = dot - total * (form.zero if zero is None else zero[:, i])
                value = fused(scale[:, i], exact, value) if i % parts else scale[:, i] * exact
        out = fused((top[:, group] / np.float32(127))[:, None], value, out)
    return out


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 arrays, rounded once.

    Products are exact in float64. Where their sum with c is not, it is moved to the neighbour with an odd last bit, so
    that rounding to float32 goes where the exact sum would go.
    """
    product, c = a.astype(np.float64) * b, np.asarray(c, np.float64)
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    even = (total.view(np.int64) & 1) == 0
    moved = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, moved, total).astype(np.float32)
