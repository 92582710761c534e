"""GLM-4 of April 2025 (0414), dense: norms after attention and MLP too, a fused MLP, and RoPE that turns adjacent pairs
in a part of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redraft.model_defs.target.families.base import (
    Family,
    HFConfig,
    Weight,
    Weights,
    decoder_weights,
    expect_silu,
    order_heads,
)

if TYPE_CHECKING:
    from redraft.model_defs.target.config import TargetConfig


def own_fields(raw: HFConfig) -> dict[str, Any]:
    expect_silu(raw)
    return {"qkv_bias": raw["attention_bias"], "sandwich_norms": True}


def usual_terms(raw: HFConfig) -> HFConfig:
    return {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5} | raw


def weights(config: TargetConfig) -> Weights:
    read = decoder_weights(config)
    for i in range(config.num_layers):
        source, layer = f"model.layers.{i}", f"layers.{i}"
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            name = f"{layer}.qkv.{kind}"
            read[name] = Weight(read[name].sources, order_heads(config, adjacent=True))
        read[f"{layer}.gate_up.weight"] = Weight((f"{source}.mlp.gate_up_proj.weight",))
        read[f"{layer}.attention_post_norm.weight"] = Weight((f"{source}.post_self_attn_layernorm.weight",))
        read[f"{layer}.mlp_post_norm.weight"] = Weight((f"{source}.post_mlp_layernorm.weight",))
    return read


GLM4 = Family("glm4", "GLM-4-0414", own_fields, weights, usual_terms, partial_rope=True)
