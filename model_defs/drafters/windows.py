"""Windows of consecutive positions of teacher data, on which drafters are trained and judged.

Position t of a document stands for one draft: the target's features of token t are known, token t + 1 is the root, and
depth d = 0, 1, ... of the draft predicts token t + 2 + d, which the target predicts from its hidden state H_{t+1+d}.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NO_DOCUMENT = -1


@dataclass(frozen=True)
class Windows:
    """W windows of S tokens each: N positions to draft from and, after them, the `unroll + 1` tokens that the last
    ones draft. A window may hold (parts of) several documents."""

    tokens: Tensor
    """int64 [W, S]"""
    hidden: Tensor
    """[W, S, H], the target's hidden states after its final norm, from which its logits follow"""
    documents: Tensor
    """int64 [W, S], which document a token belongs to; NO_DOCUMENT past the end of a shard"""
    positions: Tensor
    """int64 [W, P], the window's rows to draft from; their order is free"""
    drafted: Tensor
    """bool [W, P], false where a window has fewer than P such rows and `positions` is filled up"""
    layers: Tensor | None = None
    """[W, S, n * H], what enters some of the target's layers, side by side"""

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> Windows:
        return self._each(lambda part: part.to(device, non_blocking=True))

    def pin_memory(self) -> Windows:
        """The same windows in pinned memory, from which a GPU copies while it computes."""
        return self._each(torch.Tensor.pin_memory)

    def __getitem__(self, windows: slice | Tensor) -> Windows:
        return self._each(lambda part: part[windows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Windows:
        return Windows(
            change(self.tokens),
            change(self.hidden),
            change(self.documents),
            change(self.positions),
            change(self.drafted),
            None if self.layers is None else change(self.layers),
        )

    def rows(self, x: Tensor, kept: int, ahead: int) -> Tensor:
        """x [W, S, ...] at the first `kept` positions + `ahead`: [W, kept, ...]."""
        window = torch.arange(len(self), device=x.device)[:, None]
        return x[window, self.positions[:, :kept] + ahead]

    def flat(self, kept: int, ahead: int) -> Tensor:
        """int64 [W, kept]: where the first `kept` positions + `ahead` lie among the W * S rows."""
        window = torch.arange(len(self), device=self.positions.device)[:, None]
        return window * self.tokens.shape[1] + self.positions[:, :kept] + ahead

    def scored(self, kept: int, depth: int) -> Tensor:
        """bool [W, kept]: the first `kept` positions whose draft token of that depth the document holds."""
        here, there = (self.rows(self.documents, kept, ahead) for ahead in (0, depth + 2))
        return self.drafted[:, :kept] & (here == there) & (here != NO_DOCUMENT)
