"""Lyanna's drafter: one transformer layer, auto-regressive on hidden states (Lyanna, sections 4 and 5.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from redraft.model_defs.drafters.base import Decay, Recipe, ridge
from redraft.model_defs.drafters.context_drafter import ChainDrafter, LayerDrafter
from redraft.model_defs.drafters.token_info import TokenInfo
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.loops.chains import ChainPaths
from redraft.model_defs.loops.operators import Operators
from redraft.model_defs.target.model import Attend, Target


@dataclass(frozen=True)
class HiddenStateConfig:
    """Shape of a hidden-state drafter, with the switches of the paper's ablations.

    `token_info`: whether the last token's embedding is added to the logits, for the `info_vocabulary` most frequent
    tokens, of rank `info_rank`. `first_token`: whether h_1 is fused with the root's embedding. `chain_map`: whether a
    linear layer stands before each chain step (without it, the paper's h_{i+1} = layer(h_i)).
    """

    hidden_size: int
    vocab_size: int
    hot_vocabulary: int | None = None
    token_info: bool = True
    info_vocabulary: int = 8192
    info_rank: int = 128
    first_token: bool = True
    chain_map: bool = True


class HiddenStateDrafter(ChainDrafter, LayerDrafter):
    """h_1 = layer(fuse(H_t, E(root))), h_{i+1} = layer(map(h_i)); logits l_i = head(h_i) + token info of the token
    before. The chain does not depend on the draft tokens, so its raw logits are one matrix product."""

    name = "hidden_state"
    config_type = HiddenStateConfig
    recipe = Recipe(peak_rate=1e-3, decay=Decay.linear, window=256, batch=4, hidden_weight=0.1)
    config: HiddenStateConfig

    def __init__(self, config: HiddenStateConfig, target: Target, hot_ids: Tensor | None = None):
        super().__init__(config, target, hot_ids)
        size = config.hidden_size
        if not config.first_token:
            self.fuse = nn.Linear(size, size, bias=False)
        if config.chain_map:
            self.map = nn.Linear(size, size, bias=False)
        if config.token_info:
            kept = min(config.info_vocabulary, len(self.hot_ids))
            self.token_info = TokenInfo(self.embedding, self.hot_ids, kept, config.info_rank)

    def fused(self, features: Tensor, tokens: Tensor) -> Tensor:
        return super().fused(features, tokens) if self.config.first_token else self.fuse(features)

    def chained(self, predicted: Tensor, tokens: Tensor | None = None) -> Tensor:
        return self.map(predicted) if self.config.chain_map else predicted

    def chain(self, first: Tensor, length: int, attend: Attend) -> Tensor:
        """The chain h_1, ..., h_length, [length, ..., H], from h_1 [..., H], which `ingest` gave for the last pair."""
        states = [first]
        while len(states) < length:
            states.append(self.step(self.chained(states[-1]), attend))
        return torch.stack(states)

    def paths(self, operators: Operators, features: Tensor, *inputs: Tensor) -> ChainPaths:
        """The roots: features [P, F], and the inputs of a DraftContext."""
        context, first = self.begin(operators, features, inputs)
        states = [first]
        for level in range(1, self.levels):
            states.append(self.step(self.chained(states[-1]), context.place_chain(level)))
        return self.chain_paths(operators, context, torch.cat(states, dim=1).view(-1, self.config.hidden_size))

    @torch.no_grad()
    def initialize_chain(self, windows: Windows, inputs: Tensor) -> None:
        """Set the map to the layer's next input by ridge regression. Token info keeps its random factors: set to what
        the chain lacks, it would replace what the layer learns by itself (docs/guides/training.md)."""
        kept = windows.positions.shape[1]
        unrolled = windows.tokens.shape[1] - kept - 1
        if not self.config.chain_map or unrolled < 2:
            return
        scored = windows.scored(kept, 1)
        (first,) = self.unroll(windows, [kept])
        self.map.weight.copy_(ridge(first[scored.flatten()], windows.rows(inputs, kept, 2)[scored]))
