"""EAGLE-1 and EAGLE-2: one layer that is auto-regressive on hidden states and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from redraft.model_defs.drafters.base import Recipe
from redraft.model_defs.drafters.context_drafter import LayerDrafter
from redraft.model_defs.drafters.layer_shape import LayerShape
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.loops.context_cache import TreePaths
from redraft.model_defs.loops.operators import Operators
from redraft.model_defs.target.model import DecoderLayer, Target


@dataclass(frozen=True)
class EagleConfig:
    """Shape of an EAGLE-style drafter.

    `input_norm`, `output_norm`: whether norms stand before the layer's attention and after the layer. The published
    checkpoints have neither. `head`: the target's, or one of its own. `layer`: the layer's shape where it is not the
    target's.
    """

    hidden_size: int
    vocab_size: int
    hot_vocabulary: int | None = None
    fuse_bias: bool = False
    input_norm: bool = True
    output_norm: bool = True
    head: Literal["target", "own"] = "target"
    layer: LayerShape | None = None


class EagleDrafter(LayerDrafter):
    """f_{i+1} = layer(fuse(f_i, E(t_i))): a step takes the token drafted before it, so the head runs at each step."""

    name = "eagle"
    config_type = EagleConfig
    recipe = Recipe(peak_rate=1e-3, window=256, batch=4, hidden_weight=0.1)
    config: EagleConfig

    def __init__(self, config: EagleConfig, target: Target, hot_ids: Tensor | None = None):
        super().__init__(config, target, hot_ids)
        if config.layer:
            self.layer_config = config.layer.config(config.hidden_size, config.vocab_size)
            self.layer = DecoderLayer(self.layer_config)
        if config.fuse_bias:
            self.fuse = nn.Linear(self.fuse.in_features, config.hidden_size)
        if not config.input_norm:
            self.layer.attention_norm = nn.Identity()  # type: ignore[assignment]
        if not config.output_norm:
            self.norm = nn.Identity()
        if config.head == "own":
            self.own_head = nn.Linear(config.hidden_size, len(self.hot_ids), bias=False)

    def chained(self, predicted: Tensor, tokens: Tensor) -> Tensor:
        return self.fused(predicted, tokens)

    def paths(self, operators: Operators, features: Tensor, *inputs: Tensor) -> TreePaths:
        """The roots: features [P, F], and the inputs of a DraftContext."""
        return TreePaths(self, *self.begin(operators, features, inputs))

    @torch.no_grad()
    def initialize_chain(self, windows: Windows, inputs: Tensor) -> None:
        """A head of its own starts from the target's rows."""
        if self.config.head == "own":
            self.own_head.weight.copy_(self.head_rows)
