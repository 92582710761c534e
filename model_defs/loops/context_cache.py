"""A drafter's context cache while it drafts: the places of a batch's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.model_defs.loops.block import Block, BlockRows
from redraft.model_defs.loops.paths import Children
from redraft.model_defs.target.attention import HeadNorms, RopeTables
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Attend

if TYPE_CHECKING:
    from redraft.model_defs.loops.operators import Operators

MASK_BITS = 32


class CacheTables(nn.Module):
    """Constants of a cache of `rows` rows, for contexts of up to `context` positions."""

    no_mask: Tensor
    no_commits: Tensor

    def __init__(self, config: TargetConfig, rows: int, context: int, device: torch.device):
        """See `rope_tables`."""
        super().__init__()
        self.config, self.rows, self.ropes = config, rows, RopeTables(config, rows, context, device)
        for name, table in (
            ("no_mask", torch.zeros(0, 0, dtype=torch.int32)),
            ("no_commits", torch.zeros(0, dtype=torch.int32)),
        ):
            self.register_buffer(name, table.to(device), persistent=False)


class Context(Protocol):
    """B sequences that draft from their pairs, as the drafting loops see them."""

    last_rows: Tensor
    roots: Tensor
    sequences: Tensor
    """int32 [B]: the row of each sequence's last pair, its token, and 0, 1, ..."""
    pair_positions: Tensor
    """int [P]: the positions of the pairs"""

    def attend_pairs(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        """The `attend` of the pairs."""
        ...

    def place_chain(self, level: int) -> Attend:
        """The `attend` of one row per sequence, the chain's row `level` = 1, 2, ..."""
        ...

    def place_tree(
        self, level: int, children: Children, first: int, mask: Tensor | None
    ) -> tuple[Attend, Tensor, Tensor]:
        """The `attend` of nodes at `level` = 1, 2, ... of trees with `first` nodes each above them, their mask, and
        their positions int [N]; `mask` is that of the level before."""
        ...

    def place_block(self, width: int, mutual: bool) -> Block:
        """Blocks of `width` rows, one for each sequence after its pairs, whose rows see all pairs and the block's rows
        before them, or with `mutual` all of its rows."""
        ...


class DraftContext:
    """B sequences that draft from their pairs, back to back: see `DraftBatch`.

    The pairs are kept at the rows after those that the cache holds already. The nodes of a draft are written after
    them, level by level, and overwritten by the next draft.
    """

    def __init__(self, operators: Operators, tables: CacheTables, inputs: Sequence[Tensor]):
        """inputs: tokens int32 [P], row_offsets int32 [B + 1], slots and cache_lengths int32 [B], then the k and the v
        cache of every layer, [slots, kv_heads, rows, head_size]."""
        tokens, self._row_offsets, self._slots, self._lengths, *caches = inputs
        self._operators, self._tables = operators, tables
        self._caches = list(zip(caches[: len(caches) // 2], caches[len(caches) // 2 :], strict=True))
        self.pair_positions, self.last_rows, self._contexts, self.roots, self.sequences = operators.pair_rows(
            tokens, self._row_offsets, self._lengths
        )

    def attend_pairs(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        """The `attend` of the pairs."""
        rows = (self.pair_positions, self._row_offsets, self._slots, self._lengths, self._tables.no_mask)
        return self._attend(layer, qkv, norms, rows)

    def place_chain(self, level: int) -> Attend:
        """The `attend` of one row per sequence, the chain's row `level` = 1, 2, ..."""
        return self._place((), level, level - 1, width=1, words=0)[0]

    def place_tree(
        self, level: int, children: Children, first: int, mask: Tensor | None
    ) -> tuple[Attend, Tensor, Tensor]:
        """See `Context.place_tree`."""
        words = -(-(first + children.width) // MASK_BITS)
        grown = () if mask is None else (children.origins, mask)
        return self._place(grown, level, first, children.width, words)

    def place_block(self, width: int, mutual: bool) -> Block:
        """Blocks of `width` rows, one for each sequence after its pairs: see `model_defs.loops.block`."""
        rows = BlockRows.of(width, mutual, self._contexts.device)
        pairs = self.pair_positions, self._row_offsets, self._slots, self._lengths
        joined = rows.before(self._contexts, self.sequences, pairs)
        return Block(rows, width, self.sequences, lambda layer, qkv, norms: self._attend(layer, qkv, norms, joined))

    def _place(self, grown: tuple, level: int, first: int, width: int, words: int) -> tuple[Attend, Tensor, Tensor]:
        positions, row_offsets, mask, starts = self._operators.draft_rows(
            self._contexts, *grown, level=level, first=first, width=width, words=words
        )

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
            return self._attend(layer, qkv, norms, (positions, row_offsets, self._slots, self._contexts, mask), starts)

        return attend, mask, positions

    def _attend(
        self, layer: int, qkv: Tensor, norms: HeadNorms | None, rows: tuple[Tensor, ...], *starts: Tensor
    ) -> Tensor:
        tables, config = self._tables, self._tables.config
        return self._operators.tree_attention(
            qkv,
            *(*rows, tables.no_commits, tables.no_commits, tables.ropes.of(layer), *self._caches[layer], *starts),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            window=config.window_of(layer) or 0,
            norms=norms,
        )


class Grower(Protocol):
    """A drafter whose nodes attend to the context and to the nodes above them."""

    def most_likely(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `Drafter.most_likely`."""
        ...

    def read(self, state: Tensor) -> Tensor:
        """What the head reads [N, H] of nodes' states [N, H]."""
        ...

    def grow(self, state: Tensor, tokens: Tensor, attend: Attend, positions: Tensor | None = None) -> Tensor:
        """States [N, H] of new nodes, from those of their parents [N, H] and their own tokens int32 [N], at `positions`
        int [N], which only drafters with learned positions read."""
        ...


@dataclass
class TreePaths:
    """Nodes at a level of trees, by their states [N, H]; `first` nodes of each tree stand above them."""

    drafter: Grower
    context: Context
    state: Tensor
    level: int = 0
    first: int = 0
    mask: Tensor | None = None
    raw_logits: None = None

    def most_likely(self, count: int) -> tuple[Tensor, Tensor]:
        return self.drafter.most_likely(self.drafter.read(self.state), count)

    def extend(self, children: Children) -> TreePaths:
        attend, mask, positions = self.context.place_tree(self.level + 1, children, self.first, self.mask)
        state = self.drafter.grow(F.embedding(children.origins, self.state), children.tokens, attend, positions)
        return TreePaths(self.drafter, self.context, state, self.level + 1, self.first + children.width, mask)
