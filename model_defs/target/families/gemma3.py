"""Gemma 3, text only: norms of 1 + w before and after attention and MLP, norms of query and key heads, GELU, scaled
embeddings; five of six layers attend to a sliding window and have a RoPE table of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from redraft.model_defs.target.bounds import HEAD_NORMS
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.families.base import (
    Attention,
    Family,
    Gguf,
    GgufField,
    HFConfig,
    Weight,
    Weights,
    active_window,
    decoder_weights,
    layers_of_type,
    refuse_biases,
)
from redraft.model_defs.target.rope import RopeConfig

if TYPE_CHECKING:
    from redraft.model_defs.target.config import TargetConfig

LOCAL_ROPE = "local_rope_parameters"
"""Our name for the RoPE parameters of the layers with a window."""


def own_fields(raw: HFConfig) -> dict[str, Any]:
    refuse_biases(raw)
    for field in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(field):
            raise UnsupportedModelError(f"{field} {raw[field]}, expected none")
    if (activation := raw.get("hidden_activation") or "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise UnsupportedModelError(f"hidden_activation {activation!r}, expected 'gelu_pytorch_tanh'")
    layers = layers_of_type(raw, "sliding_attention")
    rope = RopeConfig.from_hf(raw | {"rope_parameters": raw[LOCAL_ROPE], "rope_scaling": None})
    return {
        "qkv_bias": False,
        "others": Attention(rope, active_window(raw), layers) if layers else None,
        "qk_norm": True,
        "query_scale": (raw["head_dim"] / raw["query_pre_attn_scalar"]) ** 0.5,
        "sandwich_norms": True,
        "float32_norms": True,
        "activation": "gelu",
        "embedding_scale": raw["hidden_size"] ** 0.5,
    }


def usual_terms(raw: HFConfig) -> HFConfig:
    """RoPE parameters by kind of layer, of which the older form has the local base only."""
    usual: HFConfig = {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
    raw = usual | raw
    if not raw.get("layer_types"):
        pattern = raw.get("sliding_window_pattern") or 6
        kinds = ("full_attention", *["sliding_attention"] * (pattern - 1))
        raw["layer_types"] = [kinds[(i + 1) % pattern] for i in range(raw["num_hidden_layers"])]
    rope = raw.get("rope_parameters") or {}
    if unknown := sorted(rope.keys() - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError(f"rope_parameters of {unknown[0]!r}, expected of full_attention, sliding_attention")
    everywhere = (raw.get("rope_scaling") or {}) | {"rope_theta": raw.get("rope_theta", 1_000_000.0)}
    local = {"rope_theta": raw.get("rope_local_base_freq", 10_000.0)}
    return raw | {
        "rope_parameters": rope.get("full_attention") or everywhere,
        LOCAL_ROPE: rope.get("sliding_attention") or local,
    }


def weights(config: TargetConfig) -> Weights:
    """Norms multiply by 1 + w; ours by w."""
    read = decoder_weights(config)
    for i in range(config.num_layers):
        source, layer = f"model.layers.{i}", f"layers.{i}"
        read[f"{layer}.attention_post_norm.weight"] = Weight((f"{source}.post_attention_layernorm.weight",))
        read[f"{layer}.mlp_norm.weight"] = Weight((f"{source}.pre_feedforward_layernorm.weight",))
        read[f"{layer}.mlp_post_norm.weight"] = Weight((f"{source}.post_feedforward_layernorm.weight",))

    def scaled(name: str) -> float:
        return config.query_scale if name.endswith(".q_norm.weight") else 1.0

    def norm(weight: Weight, scale: float) -> Weight:
        def change(stored: Tensor) -> Tensor:
            return (1 + stored.float()) * scale

        return Weight(weight.sources, change)

    return {
        name: norm(weight, scaled(name)) if name.endswith("norm.weight") else weight for name, weight in read.items()
    }


def gguf_config(field: GgufField) -> HFConfig:
    """Only the 27B model has another scale than its heads' size says, which the files do not tell."""
    size, hidden, heads = field("attention.key_length"), field("embedding_length"), field("attention.head_count")
    largest = (hidden, heads) == (5376, 32)
    return {
        "sliding_window": field("attention.sliding_window"),
        "query_pre_attn_scalar": hidden // heads if largest else size,
    }


GGUF = Gguf("gemma3", norm_offset=1.0, own_config=gguf_config)
READS = (
    *("layer_types", "sliding_window_pattern", "query_pre_attn_scalar", "hidden_activation"),
    *("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", *HEAD_NORMS),
)
GEMMA3 = Family("gemma3_text", "Gemma 3 (text)", own_fields, weights, usual_terms, GGUF, READS)
