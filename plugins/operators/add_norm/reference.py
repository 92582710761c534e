"""`AddNorm` in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def add_norm(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See README.md."""
    total = x + part
    return total, F.rms_norm(total, weight.shape, weight, eps)
