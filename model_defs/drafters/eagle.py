"""A baseline: EAGLE-style drafting, one layer that is auto-regressive on hidden states and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model_defs.drafters.base import Recipe
from model_defs.drafters.context_drafter import ContextDrafter
from model_defs.loops.context_cache import TreePaths
from model_defs.loops.operators import Operators
from model_defs.target.model import Attend


@dataclass(frozen=True)
class EagleConfig:
    """Shape of an EAGLE-style drafter."""

    hidden_size: int
    vocab_size: int
    hot_vocabulary: int | None = None


class EagleDrafter(ContextDrafter):
    """f_{i+1} = layer(fuse(f_i, E(t_i))): a step takes the token drafted before it, so the head runs at each step."""

    name = "eagle"
    config_type = EagleConfig
    recipe = Recipe(peak_rate=1e-3, window=256, batch=4, hidden_weight=0.1)
    config: EagleConfig

    def chained(self, predicted: Tensor, tokens: Tensor) -> Tensor:
        return self.fused(predicted, tokens)

    def grow(self, hidden: Tensor, tokens: Tensor, attend: Attend) -> Tensor:
        """See `Grower.grow`."""
        return self.step(self.chained(hidden, tokens), attend)

    def paths(self, operators: Operators, features: Tensor, *inputs: Tensor) -> TreePaths:
        """The roots: features [P, F], and the inputs of a DraftContext."""
        return TreePaths(self, *self.begin(operators, features, inputs))
