"""The operators of plugins/ that the networks of drafters hold: in torch here, as nodes of a network in `export`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from redraft.plugins.operators.draft_rows.reference import draft_rows, pair_rows
from redraft.plugins.operators.token_info_topk.reference import token_info_topk
from redraft.plugins.operators.tree_attention.torch_op import tree_attention


class Operators(Protocol):
    """See the README.md of each operator's folder."""

    def tree_attention(
        self, qkv: Tensor, *rows: Tensor, num_heads: int, num_kv_heads: int, head_size: int
    ) -> Tensor: ...

    def pair_rows(self, tokens: Tensor, row_offsets: Tensor, cache_lengths: Tensor) -> tuple[Tensor, ...]: ...

    def draft_rows(
        self, contexts: Tensor, *grown: Tensor, level: int, first: int, width: int, words: int
    ) -> tuple[Tensor, ...]: ...

    def token_info_topk(
        self,
        logits: Tensor,
        sequences: Tensor,
        tokens: Tensor,
        ids: Tensor,
        *table: Tensor,
        k: int,
        level: int,
        levels: int,
    ) -> tuple[Tensor, Tensor]: ...


class TorchOperators:
    """The operators of eager execution and exported programs."""

    @staticmethod
    def tree_attention(qkv: Tensor, *rows: Tensor, num_heads: int, num_kv_heads: int, head_size: int) -> Tensor:
        return tree_attention(qkv, *rows[:10], num_heads, num_kv_heads, head_size, *rows[10:])

    pair_rows = staticmethod(pair_rows)
    draft_rows = staticmethod(draft_rows)
    token_info_topk = staticmethod(token_info_topk)
