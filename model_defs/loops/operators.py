"""The operators of plugins/ that the networks of drafters hold: in torch here, as nodes of a network in `export`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from redraft.model_defs.loops.context_cache import CacheTables, Context, DraftContext
from redraft.model_defs.target.attention import HeadNorms
from redraft.plugins.operators.beam_step import reference as beams
from redraft.plugins.operators.beam_step import torch_op as beam_op
from redraft.plugins.operators.draft_rows import reference as rows
from redraft.plugins.operators.draft_rows import torch_op as rows_op
from redraft.plugins.operators.draw_step.reference import draw_step
from redraft.plugins.operators.perturbed_topk.torch_op import perturbed_topk
from redraft.plugins.operators.token_info_topk.reference import token_info_topk
from redraft.plugins.operators.tree_attention.torch_op import tree_attention


class Operators:
    """The operators in torch's own: see the README.md of each one's folder. Subclasses have some of them as nodes of a
    network."""

    beam_step = staticmethod(beams.beam_step)
    draw_step = staticmethod(draw_step)
    pair_rows = staticmethod(rows.pair_rows)
    draft_rows = staticmethod(rows.draft_rows)
    token_info_topk = staticmethod(token_info_topk)

    @staticmethod
    def tree_attention(
        qkv: Tensor,
        *rows: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        window: int,
        norms: HeadNorms | None,
    ) -> Tensor:
        sizes = num_heads, num_kv_heads, head_size
        return tree_attention(qkv, *rows[:10], *sizes, *(rows[10:] or (None,)), window, *(norms or ()))

    @staticmethod
    def perturbed_topk(values: Tensor, ids: Tensor, *noise: Tensor, level: int, k: int) -> tuple[Tensor, Tensor]:
        return perturbed_topk(values, ids, *noise, level, k)

    def context(self, tables: CacheTables, inputs: Sequence[Tensor]) -> Context:
        """The context cache of a drafter, from the inputs that follow the features: see `DraftContext`."""
        return DraftContext(self, tables, inputs)


class TorchOperators(Operators):
    """Those of eager execution and of exported programs for torch, which have kernels on a GPU."""

    beam_step = staticmethod(beam_op.beam_step)
    draft_rows = staticmethod(rows_op.draft_rows)


STANDARD, TORCH = Operators(), TorchOperators()
