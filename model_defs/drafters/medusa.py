"""Medusa: heads, each of which predicts the token at its own depth from the target's features."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.model_defs.drafters.base import Drafter, Recipe, ridge
from redraft.model_defs.drafters.recurrent import ResidualBlock
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.loops.operators import Operators
from redraft.model_defs.loops.paths import Children
from redraft.model_defs.target.model import Target


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of the heads: `heads` of `num_blocks` residual blocks and a linear layer each.

    `head`: "target" projects that layer's output onto the target's frozen LM-head rows; "own" is the paper's, a softmax
    layer for each depth.
    """

    hidden_size: int
    vocab_size: int
    hot_vocabulary: int | None = None
    heads: int = 5
    num_blocks: int = 1
    head: Literal["target", "own"] = "target"


class MedusaHead(nn.Module):
    def __init__(self, config: MedusaConfig, rows: int):
        """`rows`: those of an own head."""
        super().__init__()
        size = config.hidden_size
        self.blocks = nn.Sequential(*(ResidualBlock(size) for _ in range(config.num_blocks)))
        self.out = nn.Linear(size, size, bias=False) if config.head == "target" else nn.Identity()
        if config.head == "own":
            self.own_head = nn.Linear(size, rows, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """What the head reads [..., H]."""
        return self.out(self.blocks(features))


@dataclass
class MedusaPaths:
    """Nodes at a level, all of a sequence alike: the target's features [B, F], and the nodes' sequences int32 [N],
    None where they are the roots."""

    drafter: MedusaDrafter
    features: Tensor
    sequences: Tensor | None = None
    level: int = 0
    raw_logits: None = None

    def most_likely(self, count: int) -> tuple[Tensor, Tensor]:
        hidden = self.drafter.heads[self.level](self.features)
        if self.sequences is not None:
            hidden = F.embedding(self.sequences, hidden)
        return self.drafter.rank(hidden, self.drafter.head_at(self.level), count)

    def extend(self, children: Children) -> MedusaPaths:
        return MedusaPaths(self.drafter, self.features, children.sequences, self.level + 1)


class MedusaDrafter(Drafter):
    """W_d blocks_d(x) is what the head reads at depth d, for features x. No block sees a token, not even the root."""

    name = "medusa"
    config_type = MedusaConfig
    recipe = Recipe(peak_rate=1e-3)
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, target: Target, hot_ids: Tensor | None = None):
        super().__init__(config, target, hot_ids)
        self.heads = nn.ModuleList(MedusaHead(config, len(self.hot_ids)) for _ in range(config.heads))

    def head_at(self, depth: int) -> Tensor:
        """The weight [K, H] of the softmax layer at a depth."""
        head = cast(MedusaHead, self.heads[depth])
        return self.head_weight if self.config.head == "target" else head.own_head.weight

    def prepare(self, cache_rows: int, levels: int, context: int = 0) -> None:
        self.require_steps(levels)

    @property
    def most_steps(self) -> int:
        return len(self.heads)

    def paths(self, operators: Operators, features: Tensor, tokens: Tensor) -> MedusaPaths:
        """The roots: features [B, F] of the tokens before them; their own tokens int32 [B] are not read."""
        return MedusaPaths(self, self.own_features(features))

    def unroll(self, windows: Windows, kept: Sequence[int]) -> Iterator[Tensor]:
        """See `Drafter.unroll`. Raises ValueError for heads of its own, which training does not reach."""
        if self.config.head != "target":
            raise ValueError('only Medusa heads with head "target" can be trained, these have "own"')
        self.require_steps(len(kept))
        features = windows.rows(self.features_of(windows), kept[0], 0)
        for head, here in zip(self.heads, kept, strict=False):
            yield head(features[:, :here].flatten(0, 1))

    @torch.no_grad()
    def initialize(self, target: Target, windows: Windows) -> None:
        """Set each head by ridge regression from H_t to the hidden state that its token is read from."""
        kept = windows.positions.shape[1]
        heads = list(cast(Iterable[MedusaHead], self.heads))
        for depth, head in enumerate(heads[: windows.tokens.shape[1] - kept - 1]):
            scored = windows.scored(kept, depth)
            here, there = (
                windows.rows(x, kept, ahead)[scored].float()
                for x, ahead in ((windows.hidden, 0), (windows.hidden, depth + 1))
            )
            cast(nn.Linear, head.out).weight.copy_(ridge(here, there))
