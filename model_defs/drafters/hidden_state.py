"""Lyanna's drafter: one transformer layer, auto-regressive on hidden states (Lyanna, sections 4 and 5.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_defs.drafters.base import Decay, Recipe, ridge
from model_defs.drafters.context_drafter import LayerDrafter
from model_defs.drafters.token_info import InfoForm, TokenInfo
from model_defs.drafters.windows import Windows
from model_defs.loops.operators import Operators
from model_defs.loops.paths import Children
from model_defs.target.model import Attend, Target


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


@dataclass
class ChainPaths:
    """Nodes at a level of a chain: their tokens and sequences int32 [N]. `raw_logits` [B * levels, K] of all levels do
    not depend on them."""

    drafter: HiddenStateDrafter
    operators: Operators
    raw_logits: Tensor
    levels: int
    sequences: Tensor
    tokens: Tensor
    level: int = 0

    def most_likely(self, count: int) -> tuple[Tensor, Tensor]:
        drafter, levels = self.drafter, self.levels
        nodes = (self.raw_logits, self.sequences, self.tokens, drafter.columns)
        info = () if drafter.token_info is None else drafter.info.inputs(self.tokens)
        return self.operators.token_info_topk(*nodes, *info, k=count, level=self.level, levels=levels)

    def extend(self, children: Children) -> ChainPaths:
        return replace(self, sequences=children.sequences, tokens=children.tokens, level=self.level + 1)


class Resampler:
    """Drafts again from the rest of a chain, below another root (Lyanna, algorithm 2): the same drafting loops over
    raw logits that were computed before."""

    def __init__(self, drafter: HiddenStateDrafter, levels: int):
        self.drafter, self.levels = drafter, levels

    def paths(self, operators: Operators, raw_logits: Tensor, sequences: Tensor, tokens: Tensor) -> ChainPaths:
        """The roots: raw logits [B * levels, K], sequences int32 [B] (0, 1, ...) and tokens int32 [B]."""
        return ChainPaths(self.drafter, operators, raw_logits, self.levels, sequences, tokens)


class HiddenStateDrafter(LayerDrafter):
    """h_1 = layer(fuse(H_t, E(root))), h_{i+1} = layer(map(h_i)); logits l_i = head(h_i) + token info of the token
    before. The chain does not depend on the draft tokens, so its raw logits are one matrix product."""

    name = "hidden_state"
    has_raw_logits = True
    config_type = HiddenStateConfig
    recipe = Recipe(peak_rate=1e-3, decay=Decay.linear, window=256, batch=4, hidden_weight=0.1)
    config: HiddenStateConfig
    info_form = InfoForm.int8
    """How its networks hold token info; to be chosen before `prepare`."""
    columns: Tensor

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

    def prepare(self, cache_rows: int, levels: int) -> None:
        super().prepare(cache_rows, levels)
        self.levels = levels
        self.register_buffer("columns", self.hot_ids.to(torch.int32), persistent=False)
        if self.token_info is not None:
            self.info = self.token_info.stored(self.info_form)

    def paths(self, operators: Operators, features: Tensor, *inputs: Tensor) -> ChainPaths:
        """The roots: features [P, F], and the inputs of a DraftContext."""
        context, first = self.begin(operators, features, inputs)
        states = [first]
        for level in range(1, self.levels):
            states.append(self.step(self.chained(states[-1]), context.place_chain(level)))
        stacked = torch.cat(states, dim=1).view(-1, self.config.hidden_size)
        return ChainPaths(self, operators, self.raw_logits(stacked), self.levels, context.sequences, context.roots)

    def raw_logits(self, states: Tensor) -> Tensor:
        """[..., K] over the head's rows, for all steps in one pass (section 4.2), without token info."""
        return F.linear(states, self.head_rows.to(states.dtype))

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
