"""`AddNorm` and `AddNormQuantized` as torch operators, `torch.ops.redraft.add_norm` and `add_norm_quantized`, for
exported programs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from redraft.plugins.operators.add_norm import cuda, reference
from redraft.plugins.operators.fp8_linear.reference import E4M3


@torch.library.custom_op("redraft::add_norm", mutates_args=())
def add_norm(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See README.md. On a GPU by the CUDA kernel."""
    return reference.add_norm(x, part, weight, eps)


@add_norm.register_fake
def _(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@add_norm.register_kernel("cuda")
def _(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return cuda.add_norm(x, part, weight, eps)


@torch.library.custom_op("redraft::add_norm_quantized", mutates_args=())
def add_norm_quantized(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See README.md. On a GPU by the CUDA kernel."""
    return reference.add_norm_quantized(x, part, weight, eps)


@add_norm_quantized.register_fake
def _(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=E4M3), x.new_empty(x.shape[:-1], dtype=torch.float32)


@add_norm_quantized.register_kernel("cuda")
def _(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return cuda.add_norm_quantized(x, part, weight, eps)
