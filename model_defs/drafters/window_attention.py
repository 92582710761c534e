"""Attention over windows of teacher data: a drafter's cache at inference, for all positions at once."""

from __future__ import annotations

import torch
from torch import Tensor

from redraft.model_defs.target.attention import HeadNorms, apply_rope, rope_tables, split_qkv, within_window
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Attend


class WindowAttention:
    """Keys and values of one batch of windows.

    The context pass computes every row of the windows and keeps its keys and values. A chain pass computes one row for
    each of a few positions: drafted from position t, its j-th row stands at position t + j and sees the context up to
    t, the chain's rows before it, and itself.
    """

    def __init__(self, config: TargetConfig, documents: Tensor):
        """documents int64 [W, N]: a row sees only rows of its own document."""
        self.config, self.documents = config, documents
        self.windows, self.length = documents.shape
        self.tables = [table.to(documents.device) for table in rope_tables(config, 2 * self.length, self.length)]
        rows = torch.arange(self.length, device=documents.device)
        self.visible = (documents[:, :, None] == documents[:, None, :]) & (rows[:, None] >= rows)
        self.visible |= torch.eye(self.length, dtype=torch.bool, device=documents.device)
        self.context: dict[int, tuple[Tensor, Tensor]] = {}
        self.chains: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend_context(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        """An `attend` for all rows [W * N, fused]."""
        indices = torch.arange(self.length, device=qkv.device).expand_as(self.documents)
        q, k, v = self._split(layer, qkv, norms, indices)
        self.context[layer] = k, v
        scores = self._scores(q, k, within_window(self.visible, self.config.window_of(layer)))
        return self._merge(scores.softmax(-1).flatten(2, 3) @ v)

    def chain(self, positions: Tensor, depth: int) -> Attend:
        """An `attend` for rows [W * P, fused], the chain's row `depth` = 1, 2, ... of positions int64 [W, P]. Positions
        of a deeper row must be the first of the row above."""
        kept = positions.shape[1]
        visible = self.visible[torch.arange(self.windows, device=positions.device)[:, None], positions]

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
            q, k, v = self._split(layer, qkv, norms, positions + depth)
            chain = self.chains.setdefault(layer, [])
            chain[depth - 1 :] = [(k, v)]
            keys, values = (
                torch.stack([part[:, :, :kept] for part in parts], dim=3) for parts in zip(*chain, strict=True)
            )
            context_k, context_v = self.context[layer]
            own = (q.unflatten(2, (-1, kept))[..., None, :] * keys[:, :, None]).sum(-1) * self._scale
            seen, window = visible, self.config.window_of(layer)
            if window is not None:
                drafted = torch.ones(*visible.shape[:2], depth, dtype=torch.bool, device=visible.device)
                seen, drafted = within_window(torch.cat([visible, drafted], dim=-1), window).split(
                    [self.length, depth], dim=-1
                )
                own = own.masked_fill(~drafted[:, None, None], -torch.inf)
            weights = torch.cat([self._scores(q, context_k, seen), own], dim=-1).softmax(-1)
            before, owned = weights.split([self.length, depth], dim=-1)
            out = before.flatten(2, 3) @ context_v + (owned[..., None] * values[:, :, None]).sum(-2).flatten(2, 3)
            return self._merge(out)

        return attend

    @property
    def _scale(self) -> float:
        return self.config.head_size**-0.5

    def _split(
        self, layer: int, qkv: Tensor, norms: HeadNorms | None, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [W, kv_heads, group * P, D], the heads of a group one after the other; k, v [W, kv_heads, P, D]."""
        q, k, v = split_qkv(qkv.view(*positions.shape, -1), self.config, norms)
        table = self.tables[self.config.attention_of(layer)][positions]
        q, k = apply_rope(q, table), apply_rope(k, table)
        q = q.unflatten(2, (self.config.num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        return q, k.transpose(1, 2), v.transpose(1, 2)

    def _scores(self, q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
        """[W, kv_heads, group, P, N], -inf where visible [W, P, N] is false."""
        hidden = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)
        return (q @ k.transpose(-1, -2) * self._scale).unflatten(2, (-1, visible.shape[1])) + hidden[:, None, None]

    def _merge(self, out: Tensor) -> Tensor:
        """[W, kv_heads, group * P, D] to [W * P, heads * D]."""
        group = self.config.num_heads // self.config.num_kv_heads
        return out.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)
