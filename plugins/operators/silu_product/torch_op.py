"""`SiluProduct` and `SiluProductQuantized` as torch operators, `torch.ops.redraft.silu_product` and
`silu_product_quantized`, for exported programs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from redraft.plugins.operators.fp8_linear.reference import E4M3
from redraft.plugins.operators.silu_product import cuda, reference


@torch.library.custom_op("redraft::silu_product", mutates_args=())
def silu_product(gate_up: Tensor) -> Tensor:
    """See README.md. On a GPU by the CUDA kernel."""
    return reference.silu_product(gate_up)


@silu_product.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@silu_product.register_kernel("cuda")
def _(gate_up: Tensor) -> Tensor:
    return cuda.silu_product(gate_up)


@torch.library.custom_op("redraft::silu_product_quantized", mutates_args=())
def silu_product_quantized(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """See README.md. On a GPU by the CUDA kernel."""
    return reference.silu_product_quantized(gate_up)


@silu_product_quantized.register_fake
def _(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    codes = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=E4M3)
    return codes, gate_up.new_empty(gate_up.shape[:-1], dtype=torch.float32)


@silu_product_quantized.register_kernel("cuda")
def _(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return cuda.silu_product_quantized(gate_up)
