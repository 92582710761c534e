"""`SiluProduct` and `SiluProductQuantized` in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from redraft.plugins.operators.fp8_linear.reference import quantized


def silu_product(gate_up: Tensor) -> Tensor:
    """See README.md."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_product_quantized(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """See README.md."""
    return quantized(silu_product(gate_up))
