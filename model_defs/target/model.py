"""The target: the Llama family as one torch module.

The module computes everything but attention's access to context; that is a callable, so that the
same definition trains drafters (dense attention), generates (a preallocated cache) and is exported
(plugin and native forms).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_defs.files import StoredTensors, weight_files
from model_defs.target.config import TargetConfig

Join = Callable[[Tensor, Tensor], Tensor]
"""join(stream, part) -> stream: the residual stream and what a block gives, both [..., hidden_size]. Their sum; of a
shard, whose blocks give parts, the sum over all ranks."""

Attend = Callable[[int, Tensor], Tensor]
"""attend(layer, qkv) -> out: `qkv` [..., (heads + 2 kv_heads) * head_size], the fused projections of
the rows before RoPE; `out` [..., heads * head_size]. It applies RoPE, keeps the cache, and attends."""


class States(NamedTuple):
    """What a forward of the target gives for each token."""

    hidden: Tensor
    """[..., hidden_size], after the final norm: what the LM head reads"""
    features: Tensor
    """[..., feature_size], what drafters read: `hidden`, unless the target has `feature_readers`"""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class DecoderLayer(nn.Module):
    def __init__(self, config: TargetConfig):
        super().__init__()
        hidden, heads = config.hidden_size, config.num_heads * config.head_size
        kv = config.num_kv_heads * config.head_size
        self.attention_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.qkv = nn.Linear(hidden, heads + 2 * kv, bias=config.qkv_bias)
        self.attention_out = nn.Linear(heads, hidden, bias=False)
        self.mlp_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(
        self, x: Tensor, layer: int, attend: Attend, rows: Tensor | None = None, join: Join = torch.add
    ) -> Tensor:
        """One layer. `rows` int32 [n]: the rows of x [N, H] that go on after attention; others are only context."""
        attended = attend(layer, self.qkv(self.attention_norm(x)))
        if rows is not None:
            x, attended = F.embedding(rows, x), F.embedding(rows, attended)
        x = join(x, self.attention_out(attended))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return join(x, self.down(F.silu(gate) * up))


def copy_weights(layer: nn.Module, source: nn.Module) -> None:
    """Copy the weights that both layers have."""
    own = layer.state_dict()
    layer.load_state_dict({name: weight for name, weight in source.state_dict().items() if name in own}, strict=False)


class FeatureReader(nn.Module):
    """A part of the features: what enters some layers, side by side, through a module that fuses it; without layers,
    the hidden states."""

    def __init__(self, size: int, layers: tuple[int, ...] = (), fuse: nn.Module | None = None):
        """size: width of what it gives. Layer n of n is what leaves the last one, before the final norm."""
        super().__init__()
        self.size, self.layers, self.fuse = size, layers, fuse

    def forward(self, entering: Mapping[int, Tensor], hidden: Tensor) -> Tensor:
        """[..., size], from what enters each layer [..., hidden_size] and the hidden states."""
        read = torch.cat([entering[layer] for layer in self.layers], dim=-1) if self.layers else hidden
        return read if self.fuse is None else self.fuse(read)


class Target(nn.Module):
    """Token ids to states, of which `hidden` gives the logits and `features` are for drafters."""

    feature_readers: nn.ModuleList
    """The parts of the features, side by side; none: they are the hidden states"""

    def __init__(self, config: TargetConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.feature_readers = nn.ModuleList()

    @property
    def feature_size(self) -> int:
        """F, the width of the features."""
        readers = cast(Iterable[FeatureReader], self.feature_readers)
        return sum(reader.size for reader in readers) or self.config.hidden_size

    def forward(self, input_ids: Tensor, attend: Attend, join: Join = torch.add) -> States:
        """States of int [...] token ids."""
        x = self.embedding(input_ids)
        entering = {0: x}
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attend, join=join)
            entering[index + 1] = x
        hidden = self.norm(x)
        parts = [reader(entering, hidden) for reader in self.feature_readers]
        return States(hidden, torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0] if parts else hidden)

    @classmethod
    def check_weights(cls, hf: Mapping[str, Tensor], config: TargetConfig) -> Target:
        """A target without storage (device "meta"), for which these Hugging Face weights do; meta tensors are enough.

        Raises ValueError naming a missing weight, or one of another shape.
        """
        with torch.device("meta"):
            target = cls(config)
        expected = target.state_dict()
        for name, sources in hf_names(config).items():
            try:
                shapes = [hf[source].shape for source in sources]
            except KeyError as missing:
                raise ValueError(f"weight {missing} is missing") from None
            shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
            if shape != expected[name].shape or any(other[1:] != shape[1:] for other in shapes):
                raise ValueError(f"{name} has shape {shape}, expected {tuple(expected[name].shape)}")
        return target

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype | None = torch.float32) -> Target:
        """Load a Hugging Face folder's safetensors, converted to `dtype`, or as they are stored where it is None.

        The files are mapped, and one weight at a time is concatenated and converted: memory beyond the target's own is
        that of the largest. Raises UnsupportedModelError, FileNotFoundError or ValueError (a missing weight, or one of
        another shape).
        """
        config = TargetConfig.load(folder)
        weights: dict[str, Tensor] = {}
        with StoredTensors.open(weight_files(folder)) as stored:
            target = cls.check_weights(stored.shapes(), config)
            for name, sources in hf_names(config).items():
                parts = [stored.read(source) for source in sources]
                weights[name] = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(dtype or parts[0].dtype)
        if config.tie_embeddings:
            weights["lm_head.weight"] = weights["embedding.weight"]
        target.load_state_dict(weights, assign=True)
        if config.tie_embeddings:
            target.lm_head.weight = target.embedding.weight
        return target.eval().requires_grad_(False)


def give_layers(target: Target, layers: tuple[int, ...]) -> None:
    """Have the features be the hidden states and, after them, what enters these layers."""
    size = target.config.hidden_size
    target.feature_readers = nn.ModuleList([FeatureReader(size), FeatureReader(len(layers) * size, layers)])


def weight_names(config: TargetConfig) -> list[str]:
    """The Hugging Face names of all weights of a target."""
    return [name for names in hf_names(config).values() for name in names]


def hf_names(config: TargetConfig) -> dict[str, tuple[str, ...]]:
    """Our names of weights, each with the Hugging Face weights whose rows it concatenates. Tied embeddings are one."""
    names: dict[str, tuple[str, ...]] = {
        "embedding.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
    }
    if not config.tie_embeddings:
        names["lm_head.weight"] = ("lm_head.weight",)
    for i in range(config.num_layers):
        source, layer = f"model.layers.{i}", f"layers.{i}"
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            names[f"{layer}.qkv.{kind}"] = tuple(f"{source}.self_attn.{p}_proj.{kind}" for p in "qkv")
        names[f"{layer}.attention_out.weight"] = (f"{source}.self_attn.o_proj.weight",)
        names[f"{layer}.gate_up.weight"] = tuple(f"{source}.mlp.{p}_proj.weight" for p in ("gate", "up"))
        names[f"{layer}.down.weight"] = (f"{source}.mlp.down_proj.weight",)
        names[f"{layer}.attention_norm.weight"] = (f"{source}.input_layernorm.weight",)
        names[f"{layer}.mlp_norm.weight"] = (f"{source}.post_attention_layernorm.weight",)
    return names
