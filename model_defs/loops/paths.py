"""A draft model as the drafting loops see it: nodes whose children it ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor


@dataclass
class Children:
    """M nodes drafted below others, one row each, those of a sequence back to back."""

    tokens: Tensor
    """int32 [M]"""
    origins: Tensor
    """int32 [M], the row of the parent among the nodes that were expanded"""
    sequences: Tensor
    """int32 [M], the row of the sequence in the batch"""
    width: int
    """how many there are of each sequence"""


class Paths(Protocol):
    """A draft model at N nodes that are about to be expanded, one row each; at first the B roots."""

    raw_logits: Tensor | None
    """float [B * L, K]: logits of all levels of all sequences that do not depend on the nodes, where there are such"""

    def most_likely(self, count: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N, count], descending, and target ids int32 [N, count] of the most likely next tokens."""
        ...

    def extend(self, children: Children) -> Self:
        """The draft model at the children, which are expanded next."""
        ...
