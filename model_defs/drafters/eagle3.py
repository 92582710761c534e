"""EAGLE-3 and 3.1: a layer over tokens and over features of several of the target's layers, with a head of its own
(EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test, section 3). P-EAGLE drafts
all levels at once, from masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.model_defs.drafters.base import Recipe
from redraft.model_defs.drafters.context_drafter import ChainDrafter, ContextDrafter
from redraft.model_defs.drafters.layer_shape import LayerShape
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.loops.chains import ChainPaths
from redraft.model_defs.loops.context_cache import TreePaths
from redraft.model_defs.loops.operators import Operators
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Attend, DecoderLayer, RMSNorm, Target, copy_weights
from redraft.model_defs.target.rope import RopeConfig

LEAST_LAYERS = 6
"""Layers of a target whose first, middle and last third can be read."""

USUAL = "usual"


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of an EAGLE-3 drafter.

    `target_layers`: the layers of the target whose inputs it reads; () is 2, n // 2 and n - 3. `fuse_norm`: what is
    normed before `fuse`: nothing, all of them together, or each (3.1). `norm_before_residual`: whether the residual is
    taken after the norm of the state. `norm_output`: whether states are fed back after the last norm (3.1).
    `head`: one of its own, or the target's. `layer`: the layers' shape where it is not the target's.
    """

    hidden_size: int
    vocab_size: int
    hot_vocabulary: int | None = None
    target_layers: tuple[int, ...] = ()
    num_layers: int = 1
    fuse_norm: Literal["none", "all", "each"] = "none"
    norm_before_residual: bool = False
    norm_output: bool = False
    head: Literal["own", "target"] = "own"
    layer: LayerShape | None = None


@dataclass(frozen=True)
class ParallelEagle3Config(Eagle3Config):
    """Shape of a P-EAGLE drafter: `mask_token` stands for the tokens that are not drafted yet."""

    mask_token: int = 0


def usual_layers(count: int) -> tuple[int, ...]:
    """The layers that are read of a target of `count` layers. Raises ValueError for fewer than 6."""
    if count < LEAST_LAYERS:
        raise ValueError(f"the target has {count} layers: EAGLE-3 reads three of them, of at least {LEAST_LAYERS}")
    return 2, count // 2, count - 3


def trained_shape(target: TargetConfig) -> LayerShape:
    """The shape of layers that are trained: the target's, with its RoPE where other projects' configurations can say
    it."""
    shape = LayerShape.of(target)
    return shape if shape.rope.is_written else replace(shape, rope=RopeConfig(theta=shape.rope.theta))


def parse_layers(text: str, count: int) -> tuple[int, ...]:
    """Layers of a target of `count` layers, from "2+15+27" or "usual". Raises ValueError."""
    if text == USUAL:
        return usual_layers(count)
    if not all(part.isdecimal() and int(part) <= count for part in text.split("+")):
        raise ValueError(f"{text!r}: expected {USUAL}, or numbers of layers up to {count} with + between them")
    return tuple(map(int, text.split("+")))


class Fuse(nn.Module):
    """What enters several layers, as one state. The target's network computes it, so that rows that are kept for the
    drafter are H wide."""

    def __init__(self, size: int, count: int, norm: str, eps: float):
        """norm: see `Eagle3Config.fuse_norm`."""
        super().__init__()
        each = {"none": 0, "all": 1, "each": count}[norm]
        self.norms = nn.ModuleList(RMSNorm(count * size // each, eps) for _ in range(each))
        self.fc = nn.Linear(count * size, size, bias=False)

    def forward(self, layers: Tensor) -> Tensor:
        """[..., count * H] to [..., H]."""
        if len(self.norms):
            parts = layers.chunk(len(self.norms), dim=-1)
            layers = torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], dim=-1)
        return self.fc(layers)


class Eagle3Layer(DecoderLayer):
    """The first layer: its attention reads the token's embedding and the state side by side, each after its norm; what
    it gives is added to the state."""

    def __init__(self, config: TargetConfig, norm_before_residual: bool):
        super().__init__(config)
        del self.attention_norm
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.embedding_norm, self.state_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.qkv = nn.Linear(2 * size, self.qkv.out_features, bias=config.qkv_bias)

    def forward(  # type: ignore[override]
        self, state: Tensor, embedded: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """[..., H], or some of its rows, for states and embeddings [..., H]."""
        size, weight, normed = state.shape[-1], self.qkv.weight, self.state_norm(state)
        of_tokens = F.linear(self.embedding_norm(embedded), weight[:, :size], self.qkv.bias)
        attended = attend(0, of_tokens + F.linear(normed, weight[:, size:]), self.head_norms)
        x = normed if self.norm_before_residual else state
        if rows is not None:
            x, attended = F.embedding(rows, x), F.embedding(rows, attended)
        x = x + self.attention_out(attended)
        return x + self.mlp(self.mlp_norm(x))


class Eagle3Drafter(ContextDrafter):
    """f_{i+1} = layers(f_i, E(t_i)), f_0 = fuse(features): states are the drafter's own, not the target's, and its head
    reads them after its norm."""

    name = "eagle3"
    config_type = Eagle3Config
    recipe = Recipe(peak_rate=1e-3, window=256, batch=4)
    config: Eagle3Config
    fuse: Fuse

    def __init__(self, config: Eagle3Config, target: Target, hot_ids: Tensor | None = None):
        super().__init__(config, target, hot_ids)
        count = target.config.num_layers
        self.feature_layers = config.target_layers or usual_layers(count)
        if not all(0 <= layer <= count for layer in self.feature_layers):
            raise ValueError(f"the drafter reads layers {self.feature_layers}, the target has {count}")
        shape = config.layer or LayerShape.of(target.config)
        self.layer_config = shape.config(config.hidden_size, config.vocab_size, config.num_layers)
        self.context_layers = config.num_layers
        size, eps = config.hidden_size, shape.rms_norm_eps
        self.fuse = Fuse(size, len(self.feature_layers), config.fuse_norm, eps)
        self.layer = Eagle3Layer(self.layer_config, config.norm_before_residual)
        self.others = nn.ModuleList(DecoderLayer(self.layer_config) for _ in range(config.num_layers - 1))
        self.norm = RMSNorm(size, eps)
        if config.head == "own":
            self.own_head = nn.Linear(size, len(self.hot_ids), bias=False)

    @classmethod
    def configure(cls, target: Target, rows: int | None = None, settings: Mapping[str, Any] | None = None) -> Any:
        count, settings_of_run = target.config.num_layers, dict(settings or {})
        if isinstance(text := settings_of_run.get("target_layers", ()), str):
            settings_of_run["target_layers"] = parse_layers(text, count)
        config = super().configure(target, rows, settings_of_run)
        layers = config.target_layers or usual_layers(count)
        return replace(config, target_layers=layers, layer=config.layer or trained_shape(target.config))

    def ingest(self, features: Tensor, tokens: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        last, embedded = len(self.others), self.embed(tokens).to(features.dtype)
        x = self.layer(features, embedded, attend, None if last else rows)
        for index, layer in enumerate(self.others, 1):
            x = layer(x, index, attend, rows if index == last else None)
        return self.norm(x) if self.config.norm_output else x

    def grow(self, state: Tensor, tokens: Tensor, attend: Attend, positions: Tensor | None = None) -> Tensor:
        return self.ingest(state, tokens, attend)

    def read(self, state: Tensor) -> Tensor:
        return state if self.config.norm_output else self.norm(state)

    def paths(self, operators: Operators, features: Tensor, *inputs: Tensor) -> TreePaths:
        """The roots: features [P, F], and the inputs of a DraftContext."""
        return TreePaths(self, *self.begin(operators, features, inputs))

    @torch.no_grad()
    def initialize(self, target: Target, windows: Windows) -> None:
        """Copy the target's norm, its head's rows and what fits of its last layer; its attention reads the state as the
        target's does, the embedding not at all, and `fuse` takes the mean of the layers."""
        size = self.config.hidden_size
        copy_weights(self.norm, target.norm)
        if self.config.head == "own":
            self.own_head.weight.copy_(self.head_rows)
        copies, eye = self.fuse.fc.in_features // size, torch.eye(size, device=self.embedding.device)
        self.fuse.fc.weight.copy_(eye.repeat(1, copies) / copies)
        source = cast(DecoderLayer, target.layers[-1])
        if self.layer.qkv.weight[:, size:].shape == source.qkv.weight.shape:
            self.layer.qkv.weight.zero_()[:, size:] = source.qkv.weight
            copy_weights(self.layer.state_norm, source.attention_norm)
            for name in ("attention_out", "mlp_norm", "gate_up", "down"):
                if hasattr(source, name):
                    copy_weights(getattr(self.layer, name), getattr(source, name))


class ParallelEagle3Drafter(ChainDrafter, Eagle3Drafter):
    """P-EAGLE: EAGLE-3's layers over the pairs, and over one row for each deeper level. Such a row has the mask for a
    token and a trained state for features; it sees the pairs and the rows before it."""

    name = "parallel_eagle3"
    config_type = ParallelEagle3Config
    is_trained = False
    config: ParallelEagle3Config
    mask_state: Tensor

    def __init__(self, config: ParallelEagle3Config, target: Target, hot_ids: Tensor | None = None):
        super().__init__(config, target, hot_ids)
        if not 0 <= config.mask_token < config.vocab_size:
            raise ValueError(f"the drafter's mask is token {config.mask_token} of {config.vocab_size}")
        self.mask_layers = nn.Parameter(torch.zeros(self.fuse.fc.in_features))

    @torch.no_grad()
    def prepare(self, cache_rows: int, levels: int, context: int = 0) -> None:
        super().prepare(cache_rows, levels, context)
        self.register_buffer("mask_state", self.fuse(self.mask_layers), persistent=False)

    def paths(self, operators: Operators, features: Tensor, *inputs: Tensor) -> ChainPaths:  # type: ignore[override]
        """The roots: features [P, F], and the inputs of a DraftContext."""
        if self.levels == 1:
            return self.chain_paths(operators, *self.begin(operators, features, inputs))
        context = operators.context(self.tables, inputs)
        block = context.place_block(self.levels - 1, mutual=False)
        tokens = torch.cat([block.filled(torch.full_like(inputs[0][:1], self.config.mask_token)), inputs[0]])
        rows = torch.cat([block.filled(self.mask_state[None]), self.own_features(features)])
        states = self.ingest(rows, tokens, block.attend, block.with_pairs(context.last_rows))
        return self.chain_paths(operators, context, states)

    def raw_logits(self, states: Tensor) -> Tensor:
        return super().raw_logits(self.read(states))

    def unroll(self, windows: Windows, kept: Sequence[int]) -> Iterator[Tensor]:
        raise ValueError(f"drafters {self.name!r} are read from the hub and not trained here")
