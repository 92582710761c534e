"""Drafts from a chain: raw logits of all levels that do not depend on the draft tokens, to which each node adds what
its own token says about the next (Lyanna, section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from redraft.model_defs.loops.operators import Operators
from redraft.model_defs.loops.paths import Children


class Chainer(Protocol):
    """A drafter whose raw logits form a chain."""

    columns: Tensor
    """int32 [K], the target's ids of the columns of raw logits"""

    def info_inputs(self, tokens: Tensor) -> Sequence[Tensor]:
        """The inputs of the operator `TokenInfoTopK` for nodes of these tokens int32 [N]; none without token info."""
        ...


@dataclass
class ChainPaths:
    """Nodes at a level of a chain: their tokens and sequences int32 [N]. `raw_logits` [B * levels, K] of all levels do
    not depend on them."""

    drafter: Chainer
    operators: Operators
    raw_logits: Tensor
    levels: int
    sequences: Tensor
    tokens: Tensor
    level: int = 0

    def most_likely(self, count: int) -> tuple[Tensor, Tensor]:
        nodes = (self.raw_logits, self.sequences, self.tokens, self.drafter.columns)
        info = self.drafter.info_inputs(self.tokens)
        return self.operators.token_info_topk(*nodes, *info, k=count, level=self.level, levels=self.levels)

    def extend(self, children: Children) -> ChainPaths:
        return replace(self, sequences=children.sequences, tokens=children.tokens, level=self.level + 1)


class Resampler:
    """Drafts again from the rest of a chain, below another root (Lyanna, algorithm 2): the same drafting loops over
    raw logits that were computed before."""

    def __init__(self, drafter: Any, levels: int):
        """drafter: a `Chainer`, prepared."""
        self.drafter, self.levels = drafter, levels

    def paths(self, operators: Operators, raw_logits: Tensor, sequences: Tensor, tokens: Tensor) -> ChainPaths:
        """The roots: raw logits [B * levels, K], sequences int32 [B] (0, 1, ...) and tokens int32 [B]."""
        return ChainPaths(self.drafter, operators, raw_logits, self.levels, sequences, tokens)
