"""`AddNorm` and `AddNormQuantized` in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from redraft.plugins.operators.fp8_linear.reference import quantized


def add_norm(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See README.md."""
    total = x + part
    return total, F.rms_norm(total, weight.shape, weight, eps)


def add_norm_quantized(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See README.md."""
    total, normed = add_norm(x, part, weight, eps)
    return total, *quantized(normed)
