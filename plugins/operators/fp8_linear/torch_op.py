"""`Fp8Linear` and `Fp8Product` as torch operators, `torch.ops.redraft.fp8_linear` and `fp8_product`, for exported
programs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from redraft.plugins.operators.fp8_linear import cuda, reference


@torch.library.custom_op("redraft::fp8_linear", mutates_args=())
def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See README.md. On a GPU by the CUDA kernel and `torch._scaled_mm`."""
    return reference.fp8_linear(x, weight, scale, bias)


@fp8_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    reference.check(x, weight, scale, bias)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@fp8_linear.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return cuda.fp8_linear(x, weight, scale, bias)


@torch.library.custom_op("redraft::fp8_product", mutates_args=())
def fp8_product(codes: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See README.md. On a GPU by `torch._scaled_mm`."""
    return reference.fp8_product(codes, row_scale, weight, scale, bias)


@fp8_product.register_fake
def _(codes: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    reference.check_codes(codes, row_scale, weight, scale, bias)
    return codes.new_empty(*codes.shape[:-1], weight.shape[0], dtype=torch.bfloat16)


@fp8_product.register_kernel("cuda")
def _(codes: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return cuda.fp8_product(codes, row_scale, weight, scale, bias)
