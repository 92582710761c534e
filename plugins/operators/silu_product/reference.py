"""`SiluProduct` in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_product(gate_up: Tensor) -> Tensor:
    """See README.md."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
