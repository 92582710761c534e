"""A family of target models: how it reads its configuration, and what its weights are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.rope import RopeConfig

if TYPE_CHECKING:
    from redraft.model_defs.target.config import TargetConfig

HFConfig = dict[str, Any]
"""A Hugging Face `config.json`."""


@dataclass(frozen=True)
class Attention:
    """What a layer's attention sees, and how it knows positions."""

    rope: RopeConfig
    window: int | None = None
    """Rows that a row sees, itself included: the last so many of its path; None: all"""
    layers: tuple[int, ...] = ()
    """Which layers these are; empty for the usual ones"""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts instead of each layer's MLP: a router chooses `chosen` of `count` for each token."""

    count: int
    chosen: int
    normalized: bool
    """Whether the chosen experts' weights add up to 1"""


@dataclass(frozen=True)
class Weight:
    """The Hugging Face weights whose rows one of our weights concatenates, and what is done to the result."""

    sources: tuple[str, ...]
    change: Callable[[Tensor], Tensor] | None = None

    def read(self, parts: list[Tensor]) -> Tensor:
        """Our weight, from the sources' tensors."""
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole if self.change is None else self.change(whole)


Weights = dict[str, Weight]
"""A target's weights by our names. Tied embeddings are one."""


def decoder_weights(config: TargetConfig) -> Weights:
    """The names that Llama's family tree has in common."""
    weights = {
        "embedding.weight": Weight(("model.embed_tokens.weight",)),
        "norm.weight": Weight(("model.norm.weight",)),
    }
    if not config.tie_embeddings:
        weights["lm_head.weight"] = Weight(("lm_head.weight",))
    order = None if config.rope.share is None else config.rope.element_order(config.head_size)
    for i in range(config.num_layers):
        source, layer = f"model.layers.{i}", f"layers.{i}"
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            projections = tuple(f"{source}.self_attn.{p}_proj.{kind}" for p in "qkv")
            weights[f"{layer}.qkv.{kind}"] = Weight(projections, order_heads(config))
        if config.qk_norm:
            for p in "qk":
                change = None if order is None else lambda weight: weight[order]
                weights[f"{layer}.{p}_norm.weight"] = Weight((f"{source}.self_attn.{p}_norm.weight",), change)
        weights[f"{layer}.attention_out.weight"] = Weight((f"{source}.self_attn.o_proj.weight",))
        weights[f"{layer}.gate_up.weight"] = Weight(tuple(f"{source}.mlp.{p}_proj.weight" for p in ("gate", "up")))
        weights[f"{layer}.down.weight"] = Weight((f"{source}.mlp.down_proj.weight",))
        weights[f"{layer}.attention_norm.weight"] = Weight((f"{source}.input_layernorm.weight",))
        weights[f"{layer}.mlp_norm.weight"] = Weight((f"{source}.post_attention_layernorm.weight",))
    return weights


def order_heads(config: TargetConfig, adjacent: bool = False) -> Callable[[Tensor], Tensor] | None:
    """The change of fused projections [fused, ...] that puts the elements of query and key heads in our order; None
    where a checkpoint has that order already. `adjacent`: whether it turns adjacent elements together."""
    if config.rope.share is None and not adjacent:
        return None
    order, turned = config.rope.element_order(config.head_size, adjacent), config.num_heads + config.num_kv_heads

    def change(weight: Tensor) -> Tensor:
        heads = weight.unflatten(0, (-1, config.head_size))
        return torch.cat([heads[:turned, order], heads[turned:]]).flatten(0, 1)

    return change


def expert_weights(config: TargetConfig, block: str, gate: str, up: str, down: str) -> Weights:
    """`decoder_weights` of a mixture of experts, whose layers call it `block` and an expert's projections so."""
    assert config.experts is not None
    count = config.experts.count
    weights = {
        name: weight
        for name, weight in decoder_weights(config).items()
        if not name.endswith((".gate_up.weight", ".down.weight"))
    }
    for i in range(config.num_layers):
        source, layer = f"model.layers.{i}.{block}", f"layers.{i}.experts"
        each = [f"{source}.experts.{e}" for e in range(count)]
        weights[f"{layer}.router.weight"] = Weight((f"{source}.gate.weight",))
        weights[f"{layer}.gate_up"] = Weight(
            tuple(f"{expert}.{p}.weight" for expert in each for p in (gate, up)),
            lambda weight: weight.unflatten(0, (count, -1)),
        )
        weights[f"{layer}.down"] = Weight(
            tuple(f"{expert}.{down}.weight" for expert in each), lambda weight: weight.unflatten(0, (count, -1))
        )
    return weights


GgufField = Callable[[str], Any]
"""A field of a GGUF file by its name without the architecture, None where the file lacks it."""


@dataclass(frozen=True)
class Gguf:
    """How llama.cpp's files hold a family. Tensors' names are the `gguf` package's for the architecture."""

    architecture: str
    turned: bool = False
    """Whether rows of query and key heads lie in adjacent pairs instead of two halves"""
    norm_offset: float = 0.0
    """What norms' weights are more than Hugging Face's"""
    own_config: Callable[[GgufField], HFConfig] = lambda field: {}
    """Entries of `config.json` that other families do not have, or read from other fields"""


@dataclass(frozen=True)
class Family:
    """Models of one Hugging Face architecture, all of which the target's layers compute."""

    model_type: str
    """The architecture's name in `config.json`."""
    title: str
    """Its models in words, for messages."""
    own_fields: Callable[[HFConfig], dict[str, Any]]
    """The fields of `TargetConfig` that the family reads in its own way, by name. Raises UnsupportedModelError
    for a feature that the layers do not compute."""
    weights: Callable[[TargetConfig], Weights] = decoder_weights
    usual_terms: Callable[[HFConfig], HFConfig] = dict
    """The configuration in the terms that most families use."""
    gguf: Gguf | None = None
    """None where GGUF files of the family are not read"""
    reads: tuple[str, ...] = ()
    """The fields of `bounds.NEUTRAL`, and `layer_types`, that it reads"""
    partial_rope: bool = False
    """Whether it reads `partial_rotary_factor`; other families rotate whole heads"""


def expect_silu(raw: HFConfig) -> None:
    """Raise UnsupportedModelError for another activation than Llama's."""
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {raw['hidden_act']!r}, expected 'silu'")


def refuse_biases(raw: HFConfig) -> None:
    """Raise UnsupportedModelError for biases beside those that a family always has."""
    for flag in ("attention_bias", "mlp_bias"):
        if raw.get(flag):
            raise UnsupportedModelError(f"{flag} true, expected false")


def active_window(raw: HFConfig) -> int | None:
    """The sliding window, or None where it is as large as the context, or 0."""
    window = raw.get("sliding_window")
    return None if not window or window >= raw["max_position_embeddings"] else window


def refuse_sliding_window(raw: HFConfig) -> None:
    """Raise UnsupportedModelError for a window in a family that has none."""
    if window := active_window(raw):
        raise UnsupportedModelError(
            f"an active sliding window of {window} tokens, expected full attention to all "
            f"{raw['max_position_embeddings']}"
        )


def layers_of_type(raw: HFConfig, kind: str) -> tuple[int, ...]:
    """The layers whose entry in `layer_types` is this."""
    return tuple(i for i, layer_type in enumerate(raw["layer_types"]) if layer_type == kind)
