"""`AddNorm` as a torch operator, `torch.ops.redraft.add_norm`, for exported programs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from redraft.plugins.operators.add_norm import cuda, reference


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
