"""A drafter's context cache in networks of standard operators: `DraftContext` over padded pairs [B, N].

The pairs go into the cache by TensorScatter. The nodes of a draft do not: their keys and values stand beside the cache
as tensors of their own, since TensorRT's KVCacheUpdate takes only a network's input, and they are discarded anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from redraft.model_defs.loops.block import Block, BlockRows
from redraft.model_defs.loops.context_cache import CacheTables
from redraft.model_defs.loops.paths import Children
from redraft.model_defs.target.attention import HeadNorms, split_qkv, within_window
from redraft.model_defs.target.model import Attend

HIDDEN_SCORE = -3e4
"""Score added where a row must not see a key; fp16 holds it."""


def scatter_rows(cache: Tensor, update: Tensor, write_indices: Tensor) -> Tensor:
    """A TensorScatter node: rows `update` [B, heads, N, head_size] from write_indices int64 [B] on."""
    return torch.onnx.ops.symbolic(
        "TensorScatter",
        (cache, update, write_indices),
        attrs={"axis": 2, "mode": "linear"},
        dtype=update.dtype,
        shape=cache.shape,
    )


class NativeContext:
    """The `DraftContext` of networks in native form. Levels must be placed in order, from 1."""

    def __init__(self, tables: CacheTables, inputs: Sequence[Tensor]):
        """inputs: tokens int32 [B * N], pair_counts and write_indices int64 [B], then the k and the v cache of every
        layer, [B, kv_heads, rows, head_size]. Pairs past a sequence's count are padding."""
        tokens, counts, self._starts, *caches = inputs
        self._tables, self._config = tables, tables.config
        self.caches = dict(enumerate(zip(caches[: len(caches) // 2], caches[len(caches) // 2 :], strict=True)))
        """k and v of every layer, updated as it attends."""
        self._drafted: dict[int, tuple[Tensor, Tensor]] = {}
        self._batch, self._rows = counts.shape[0], caches[0].shape[2]
        numbers = torch.arange(self._batch)
        self.last_rows = (numbers * (tokens.shape[0] // self._batch) + counts - 1).to(torch.int32)
        self.roots, self.sequences = tokens.gather(0, self.last_rows.long()), numbers.to(torch.int32)
        self._contexts = self._starts + counts
        self._places = self._starts[:, None] + torch.arange(tokens.shape[0] // self._batch)
        self.pair_positions = self._places.flatten()

    def attend_pairs(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        """The `attend` of the pairs."""
        columns = self._places
        q, k, v = self._heads(layer, qkv, norms, columns)
        old_k, old_v = self.caches[layer]
        self.caches[layer] = scatter_rows(old_k, k, self._starts), scatter_rows(old_v, v, self._starts)
        seen = within_window(torch.arange(self._rows) <= columns[..., None], self._config.window_of(layer))
        mask = self._hide(seen, q.dtype)[:, None]
        scale = self._config.head_size**-0.5
        out = torch.onnx.ops.attention(q, *self.caches[layer], mask, scale=scale)[0]
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def place_chain(self, level: int) -> Attend:
        """The `attend` of one row per sequence, the chain's row `level` = 1, 2, ..."""
        return self._place(self._level(level, 1), torch.ones(self._batch, 1, level, dtype=torch.bool))

    def place_tree(
        self, level: int, children: Children, first: int, mask: Tensor | None
    ) -> tuple[Attend, Tensor, Tensor]:
        """See `Context.place_tree`; masks are bool [B * W, first + W]."""
        width = children.width
        seen = torch.eye(width, dtype=torch.bool).repeat(self._batch, 1)
        if mask is not None:
            seen = torch.cat([mask[children.origins.long()], seen], dim=1)
        columns = self._level(level, width)
        return self._place(columns, seen.unflatten(0, (self._batch, width))), seen, columns.flatten()

    def place_block(self, width: int, mutual: bool) -> Block:
        """See `Context.place_block`. Here a row may see rows after it, so none stands twice."""
        rows = torch.arange(width)
        seen = torch.ones(width, width, dtype=torch.bool)
        seen = (seen if mutual else seen.tril()).expand(self._batch, -1, -1)
        attend_block = self._place(self._contexts[:, None] + rows, seen)

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
            count = self._batch * width
            pairs = self.attend_pairs(layer, qkv[count:], norms)
            return torch.cat([attend_block(layer, qkv[:count], norms), pairs])

        return Block(BlockRows.of(width, False, rows.device), width, self.sequences, attend)

    def _level(self, level: int, width: int) -> Tensor:
        """int64 [B, W]: where the nodes of a level stand."""
        return (self._contexts + (level - 1))[:, None].expand(-1, width)

    def _place(self, places: Tensor, seen: Tensor) -> Attend:
        """The `attend` of nodes at places int64 [B, W] that see `seen` bool [B, W, n] of the n nodes after the
        context."""
        width, config = seen.shape[1], self._config
        groups = config.num_heads // config.num_kv_heads

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
            q, drafted_k, drafted_v = self._heads(layer, qkv, norms, places)
            if layer in self._drafted:
                above_k, above_v = self._drafted[layer]
                drafted_k, drafted_v = torch.cat([above_k, drafted_k], dim=2), torch.cat([above_v, drafted_v], dim=2)
            self._drafted[layer] = drafted_k, drafted_v
            k, v = self.caches[layer]
            q = (q * config.head_size**-0.5).unflatten(1, (config.num_kv_heads, groups)).flatten(2, 3)
            behind = (torch.arange(self._rows) < self._contexts[:, None])[:, None].expand(-1, width, -1)
            visible = within_window(torch.cat([behind, seen], dim=-1), config.window_of(layer))
            context = (q @ k.transpose(2, 3)).unflatten(2, (groups, width))
            context = (context + self._hide(visible[..., : self._rows], q.dtype)[:, None, None]).flatten(2, 3)
            own = (q @ drafted_k.transpose(2, 3)).unflatten(2, (groups, width))
            own = (own + self._hide(visible[..., self._rows :], q.dtype)[:, None, None]).flatten(2, 3)
            weights = torch.cat([context, own], dim=-1).float().softmax(-1).to(q.dtype)
            out = weights[..., : self._rows] @ v + weights[..., self._rows :] @ drafted_v
            return out.unflatten(2, (groups, width)).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1)

        return attend

    def _heads(self, layer: int, qkv: Tensor, norms: HeadNorms | None, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, heads, N, head_size] of rows [B * N, fused] that stand at places int64 [B, N]."""
        q, k, v = (x.transpose(1, 2) for x in split_qkv(qkv.unflatten(0, places.shape), self._config, norms))
        cos, sin = self._tables.ropes.of(layer).to(qkv.dtype).chunk(2, dim=-1)
        q, k = (torch.onnx.ops.rotary_embedding(x, cos, sin, places) for x in (q, k))
        return q, k, v

    @staticmethod
    def _hide(seen: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.where(seen, 0.0, HIDDEN_SCORE).to(dtype)
