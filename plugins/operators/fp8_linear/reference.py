"""`Fp8Linear` in torch, exact and slow."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""E4M3's largest number"""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
STEP = 16
"""N and K of a product are multiples of this"""
ROWS = 512
"""Rows of a matrix that are widened at a time: float64 takes 8 times their memory"""


def quantize_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """E4M3 codes and scales float32 [rows] of floats x [rows, K]; without scales each row's is its largest magnitude /
    LARGEST. A code is that of the nearest number in E4M3, at most LARGEST."""
    x = x.float()
    if scale is None:
        scale = (x.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (x / scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), scale


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See README.md. Raises ValueError for tensors that do not fit."""
    check(x, weight, scale, bias)
    codes, row_scale = quantize_rows(x.flatten(0, -2))
    rows = codes.double()
    out = torch.cat([rows @ part.double().T for part in weight.split(ROWS)], dim=-1)
    out *= row_scale.double()[:, None]
    out *= scale.double()
    if bias is not None:
        out += bias.double()
    return out.to(x.dtype).unflatten(0, x.shape[:-1])


def check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError where the tensors are not what README.md says."""
    if x.dtype != torch.bfloat16 or weight.dtype != E4M3 or scale.dtype != torch.float32:
        raise ValueError(f"x {x.dtype}, weight {weight.dtype}, scale {scale.dtype}: expected bfloat16, {E4M3}, float32")
    if weight.ndim != 2 or any(size % STEP for size in weight.shape):
        raise ValueError(f"weight {tuple(weight.shape)}: expected two sizes that are multiples of {STEP}")
    rows, features = weight.shape
    if x.ndim < 2 or x.shape[-1] != features or scale.shape != (rows,):
        raise ValueError(f"x {tuple(x.shape)} and scale {tuple(scale.shape)} for a weight {tuple(weight.shape)}")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (rows,)):
        raise ValueError(f"bias {bias.dtype} {tuple(bias.shape)}: expected {x.dtype} ({rows},)")
