"""`Fp8Linear` and `Fp8Product` in torch, exact and slow."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
LARGEST = 448.0
"""E4M3's largest number"""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
STEP = 16
"""N and K of a product are multiples of this"""
ROWS = 512
"""Rows of a matrix that are widened at a time: float64 takes 8 times their memory, and float32 4 times"""


def quantize_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """E4M3 codes and scales float32 [rows] of floats x [rows, K]; without scales each row's is its largest magnitude /
    LARGEST. A code is that of the nearest number in E4M3, at most LARGEST."""
    codes = x.new_empty(x.shape, dtype=E4M3)
    scales = x.new_empty(len(x), dtype=torch.float32) if scale is None else scale
    for begin in range(0, len(x), ROWS):
        rows = slice(begin, begin + ROWS)
        part = x[rows].float()
        if scale is None:
            scales[rows] = (part.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE)
        codes[rows] = (part / scales[rows, None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return codes, scales


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See README.md. Raises ValueError for tensors that do not fit."""
    check(x, weight, scale, bias)
    return fp8_product(*quantized(x), weight, scale, bias)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes like x [..., K] and scales float32 [...] of its rows: see README.md."""
    codes, scales = quantize_rows(x.flatten(0, -2))
    return codes.reshape(x.shape), scales.reshape(x.shape[:-1])


def fp8_product(codes: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See README.md. Raises ValueError for tensors that do not fit."""
    check_codes(codes, row_scale, weight, scale, bias)
    rows = codes.flatten(0, -2).double()
    out = torch.cat([rows @ part.double().T for part in weight.split(ROWS)], dim=-1)
    out *= row_scale.flatten().double()[:, None]
    out *= scale.double()
    if bias is not None:
        out += bias.double()
    return out.to(BF16).unflatten(0, codes.shape[:-1])


def check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype = BF16) -> None:
    """Raise ValueError where the tensors are not what README.md says, with rows x in `dtype`."""
    if x.dtype != dtype or weight.dtype != E4M3 or scale.dtype != torch.float32:
        raise ValueError(f"x {x.dtype}, weight {weight.dtype}, scale {scale.dtype}: expected {dtype}, {E4M3}, float32")
    if weight.ndim != 2 or any(size % STEP for size in weight.shape):
        raise ValueError(f"weight {tuple(weight.shape)}: expected two sizes that are multiples of {STEP}")
    rows, features = weight.shape
    if x.ndim < 2 or x.shape[-1] != features or scale.shape != (rows,):
        raise ValueError(f"x {tuple(x.shape)} and scale {tuple(scale.shape)} for a weight {tuple(weight.shape)}")
    if bias is not None and (bias.dtype != BF16 or bias.shape != (rows,)):
        raise ValueError(f"bias {bias.dtype} {tuple(bias.shape)}: expected {BF16} ({rows},)")


def check_codes(codes: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    """The same for rows of codes with a scale each."""
    check(codes, weight, scale, bias, E4M3)
    if row_scale.dtype != torch.float32 or row_scale.shape != codes.shape[:-1]:
        raise ValueError(f"scales {row_scale.dtype} {tuple(row_scale.shape)} for rows {tuple(codes.shape)}")
