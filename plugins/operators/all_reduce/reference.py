"""The reference of `AllReduce`: the sum of all ranks' parts."""

from __future__ import annotations

from torch import Tensor


def all_reduce(parts: Tensor) -> Tensor:
    """Sum [...] of parts [ranks, ...] in the order of ranks, in float32, then rounded to the parts'
    dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
