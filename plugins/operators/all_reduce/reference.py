"""What `AllReduce` computes, of all ranks' parts at once."""

from __future__ import annotations

from torch import Tensor


def all_reduce(parts: Tensor) -> Tensor:
    """[ranks, ...] to what every rank gets: their sum in the order of ranks, in float32, then rounded to the parts'
    dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
