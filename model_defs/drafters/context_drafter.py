"""Drafters of transformer layers that attend to the committed text: the bases of Lyanna's and EAGLE's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.model_defs.drafters.base import Drafter, ridge
from redraft.model_defs.drafters.token_info import InfoForm, TokenInfoFactors, TokenInfoTable
from redraft.model_defs.drafters.window_attention import WindowAttention
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.loops.chains import ChainPaths
from redraft.model_defs.loops.context_cache import CacheTables, Context
from redraft.model_defs.loops.operators import Operators
from redraft.model_defs.precision import working_precision
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Attend, DecoderLayer, Target, copy_weights, norm_of

SAMPLED_WINDOWS = 32
"""Windows of the closed-form start."""


class ContextDrafter(Drafter):
    """States predicted by transformer layers that attend to all committed pairs.

    For every committed position t the layers ingest the pair (target features at t, embedding of token t + 1); their
    keys and values stay in the drafter's cache, their output is the state that follows. From there drafting grows
    states: one row per drafted token after the ingested ones, discarded after drafting.
    """

    reads_context = True
    context_layers = 1
    layer_config: TargetConfig
    """Shape of its layers"""
    tables: CacheTables

    def ingest(self, features: Tensor, tokens: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """States [..., H] that follow committed pairs, or some of them: features [..., F], tokens int [...]."""
        raise NotImplementedError

    def grow(self, state: Tensor, tokens: Tensor, attend: Attend, positions: Tensor | None = None) -> Tensor:
        """See `Grower.grow`; for any states [..., H] and tokens int [...]."""
        raise NotImplementedError

    def read(self, state: Tensor) -> Tensor:
        """What the head reads [..., H] of states [..., H]."""
        return state

    def prepare(self, cache_rows: int, levels: int, context: int = 0) -> None:
        self.tables = CacheTables(self.layer_config, cache_rows, context, self.embedding.device)

    def begin(self, operators: Operators, features: Tensor, inputs: Sequence[Tensor]) -> tuple[Context, Tensor]:
        """Ingest pairs: features [P, F], and the inputs of a DraftContext. Returns the context and the states [B, H]
        that follow each sequence's last pair."""
        context = operators.context(self.tables, inputs)
        return context, self.ingest(self.own_features(features), inputs[0], context.attend_pairs, context.last_rows)

    def unroll(self, windows: Windows, kept: Sequence[int]) -> Iterator[Tensor]:
        length = windows.tokens.shape[1] - len(kept) - 1
        attention = WindowAttention(self.layer_config, windows.documents[:, :length])
        features, tokens = self.features_of(windows)[:, :length], windows.tokens[:, 1 : length + 1]
        states = self.ingest(features.flatten(0, 1), tokens.flatten(), attention.attend_context)
        states = windows.rows(states.unflatten(0, (-1, length)), kept[0], 0)
        yield self.read(states.flatten(0, 1))
        for depth, here in enumerate(kept[1:], 1):
            last = windows.rows(windows.tokens, here, depth + 1).flatten()
            attend = attention.chain(windows.positions[:, :here], depth)
            states = self.grow(states[:, :here].flatten(0, 1), last, attend).unflatten(0, (-1, here))
            yield self.read(states.flatten(0, 1))


class ChainDrafter(ContextDrafter):
    """States of all levels that do not depend on the draft tokens, so that their logits are one matrix product (Lyanna,
    section 4.2); token info, where there is any, adds what a node's own token says."""

    has_raw_logits = True
    info_forms: ClassVar[tuple[InfoForm, ...]] = tuple(InfoForm)
    """The forms in which its networks can hold token info."""
    info_form = InfoForm.int8
    """The one in which they do; to be chosen before `prepare`."""
    info: TokenInfoTable | TokenInfoFactors
    columns: Tensor
    levels: int

    def prepare(self, cache_rows: int, levels: int, context: int = 0) -> None:
        super().prepare(cache_rows, levels, context)
        self.levels = levels
        self.register_buffer("columns", self.hot_ids.to(torch.int32), persistent=False)
        if self.token_info is not None:
            self.info = self.token_info.stored(self.info_form)

    def info_inputs(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """See `Chainer.info_inputs`."""
        return () if self.token_info is None else self.info.inputs(tokens)

    def raw_logits(self, states: Tensor) -> Tensor:
        """[..., K] over the head's rows, for all levels in one pass, without token info."""
        return F.linear(states, self.head_weight.to(states.dtype))

    def chain_paths(self, operators: Operators, context: Context, states: Tensor) -> ChainPaths:
        """The roots, from what the head reads [B * levels, H] at all levels of each sequence."""
        return ChainPaths(self, operators, self.raw_logits(states), self.levels, context.sequences, context.roots)


class LayerDrafter(ContextDrafter):
    """Hidden states predicted by one layer: the pair is fused by a linear layer, the layer's output predicts H_{t+1},
    and a chain from there H_{t+2}, ..."""

    fuse: nn.Linear

    def __init__(self, config: Any, target: Target, hot_ids: Tensor | None = None):
        super().__init__(config, target, hot_ids)
        size = config.hidden_size
        self.layer_config = target.config.for_layers(1)
        self.fuse = nn.Linear(2 * size, size, bias=False)
        self.layer = DecoderLayer(self.layer_config)
        self.norm: nn.Module = norm_of(target.config)

    def fused(self, features: Tensor, tokens: Tensor) -> Tensor:
        """The layer's input [..., H] for features [..., F] and the tokens int64 [...] that follow them."""
        size, weight = self.config.hidden_size, self.fuse.weight
        embedded = self.embed(tokens).to(features.dtype)
        return F.linear(features, weight[:, :size], self.fuse.bias) + F.linear(embedded, weight[:, size:])

    def chained(self, predicted: Tensor, tokens: Tensor) -> Tensor:
        """The layer's input [..., H] of a chain step, for its predicted hidden states and the tokens drafted last."""
        raise NotImplementedError

    def step(self, inputs: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Predicted hidden states [..., H] of the layer's inputs [..., H], or of some of their rows."""
        return self.norm(self.layer(inputs, 0, attend, rows))

    def ingest(self, features: Tensor, tokens: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        return self.step(self.fused(features, tokens), attend, rows)

    def grow(self, state: Tensor, tokens: Tensor, attend: Attend, positions: Tensor | None = None) -> Tensor:
        return self.step(self.chained(state, tokens), attend)

    @torch.no_grad()
    def initialize(self, target: Target, windows: Windows) -> None:
        """Copy the target's last layer and norm; set the layer's inputs by ridge regression."""
        windows = replace(windows[:SAMPLED_WINDOWS], hidden=windows.hidden[:SAMPLED_WINDOWS].float())
        copy_weights(self.layer, target.layers[-1])
        copy_weights(self.norm, target.norm)
        inputs = last_layer_inputs(target, windows)
        pairs = torch.cat([windows.hidden[:, :-1], self.embed(windows.tokens[:, 1:]).float()], dim=-1)
        here = pairs[..., : self.fuse.in_features]
        self.fuse.weight.copy_(ridge(here.flatten(0, 1), inputs[:, 1:].flatten(0, 1)))
        self.initialize_chain(windows, inputs)

    def initialize_chain(self, windows: Windows, inputs: Tensor) -> None:
        """Set the other weights, given windows with float32 hidden states and the inputs [W, S, H] of the target's last
        layer at their tokens."""


@torch.no_grad()
def last_layer_inputs(target: Target, windows: Windows) -> Tensor:
    """Inputs float32 [W, S, H] of the target's last layer at the windows' tokens; a token sees only its own window."""
    attention = WindowAttention(target.config, windows.documents)
    x = target.embed(windows.tokens).flatten(0, 1)
    with working_precision(x.device):
        for index, layer in enumerate(list(target.layers)[:-1]):
            x = layer(x, index, attention.attend_context)
    return x.float().unflatten(0, windows.tokens.shape)
