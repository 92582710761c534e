"""Blocks: rows of each sequence that draft at once, in one attention with the pairs that they see.

An attention's rows are those of all blocks, sequence by sequence, and then the pairs [P]. It writes all keys and values
before any row reads them, so that blocks see the pairs of the same call.

TreeAttention shows a row no row after it. Where the rows of a block see each other, each therefore stands twice: the
first W only to be seen, the last W to see them. With W = 3, rows 3 to 5 are the block. All six see the context, and:

    row     0   1   2   3         4         5
    place   0   1   2   0         1         2
    sees    0   0,1 0-2 1, 2, 3   0, 2, 4   0, 1, 5

A row sees its own key once, as itself. What rows 0 to 2 give is not read. No cache keeps any of these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.model_defs.target.model import Attend
from redraft.plugins.operators.draft_rows.reference import BITS, pack_bits


@dataclass(frozen=True)
class BlockRows:
    """The rows of one sequence's block, as constants."""

    places: Tensor
    """int32 [n], where each row stands after the context"""
    mask: Tensor
    """int32 [n, words], the tree mask; [0, 0] where all rows are causal"""

    @classmethod
    def of(cls, width: int, mutual: bool, device: torch.device) -> BlockRows:
        """The rows of a block of `width`, which see each other with `mutual`, else those before them."""
        places = torch.arange(width, dtype=torch.int32, device=device)
        if not mutual:
            return cls(places, torch.zeros(0, 0, dtype=torch.int32, device=device))
        bits = torch.arange(-(-2 * width // BITS) * BITS, device=device)
        rows = torch.arange(2 * width, device=device)[:, None]
        others = (bits < width) & (bits != rows - width)
        seen = (rows >= width) & (others | (bits == rows))
        return cls(torch.cat([places, places]), pack_bits(seen))

    def before(self, contexts: Tensor, sequences: Tensor, pairs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The positions, row_offsets, slots, cache_lengths and tree mask of blocks after contexts int32 [B], of
        sequences int32 [B] (0, 1, ...), and then of the pairs, by their first four."""
        positions, row_offsets, slots, lengths = pairs
        count, batch = len(self.places), contexts.shape[0]
        mask = self.mask
        if len(mask):
            mask = torch.cat([mask.repeat(batch, 1), mask.new_zeros(positions.shape[0], mask.shape[1])])
        return (
            torch.cat([(contexts[:, None] + self.places).flatten(), positions]),
            torch.cat([sequences * count, row_offsets + batch * count]),
            torch.cat([slots, slots]),
            torch.cat([contexts, lengths]),
            mask,
        )


@dataclass(frozen=True)
class Block:
    """The blocks of B sequences, W rows each, and the pairs."""

    rows: BlockRows
    width: int
    sequences: Tensor
    """int32 [B]: 0, 1, ..."""
    attend: Attend
    """Takes what `spread` gives"""

    def spread(self, qkv: Tensor) -> Tensor:
        """The rows of attention, from those of the blocks and then of the pairs [B * W + P, ...]."""
        if len(self.rows.places) == self.width:
            return qkv
        indices = (self.sequences[:, None] * self.width + self.rows.places).flatten()
        first = self.sequences.shape[0] * self.width
        pairs = torch.arange(first, qkv.shape[0], dtype=torch.int32, device=qkv.device)
        return F.embedding(torch.cat([indices, pairs]), qkv)

    def filled(self, row: Tensor) -> Tensor:
        """[B * W, ...]: the same row [1, ...] everywhere in the blocks."""
        return row.expand(self.sequences.shape[0] * self.width, *row.shape[1:])

    def with_pairs(self, pairs: Tensor) -> Tensor:
        """int32 [B * (1 + W)]: each sequence's pair, by its row among the pairs int32 [B], and the rows of its block,
        which do not stand twice; numbered among all blocks' rows and then the pairs."""
        indices = self._places(self.width, 0, self.width).unflatten(0, (-1, self.width))
        return torch.cat([(pairs + self.sequences.shape[0] * self.width)[:, None], indices], dim=1).flatten()

    def own(self, attended: Tensor) -> Tensor:
        """What attention gave for the blocks' rows [B * W, ...], of what it gave for all rows."""
        count = len(self.rows.places)
        return F.embedding(self._places(count, count - self.width, self.width), attended)

    def slice_rows(self, rows: Tensor, first: int, count: int) -> Tensor:
        """[B * count, ...], of the blocks' rows [B * W, ...] `count` of each from the row `first` on."""
        return F.embedding(self._places(self.width, first, count), rows)

    def _places(self, stride: int, first: int, count: int) -> Tensor:
        """int32 [B * count]: `count` of each sequence's `stride` rows, from the row `first` on."""
        columns = torch.arange(first, first + count, dtype=torch.int32, device=self.sequences.device)
        return (self.sequences[:, None] * stride + columns).flatten()
