"""Phi-3, Phi-3.5 and Phi-4-mini: Llama's layers, whose projections are stored fused. RoPE turns a part of each head
and is scaled by LongRoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redraft.model_defs.target.families.base import (
    Family,
    Gguf,
    GgufField,
    HFConfig,
    Weight,
    Weights,
    active_window,
    decoder_weights,
    expect_silu,
    order_heads,
    refuse_biases,
)

if TYPE_CHECKING:
    from redraft.model_defs.target.config import TargetConfig


def own_fields(raw: HFConfig) -> dict[str, Any]:
    expect_silu(raw)
    refuse_biases(raw)
    return {"qkv_bias": False, "window": active_window(raw)}


def usual_terms(raw: HFConfig) -> HFConfig:
    """LongRoPE was called "su" and, by mistake, "yarn" first."""
    for name in ("rope_parameters", "rope_scaling"):
        scaling = raw.get(name) or {}
        if {scaling.get("type"), scaling.get("rope_type")} & {"su", "yarn"}:
            raw = raw | {name: scaling | {"rope_type": "longrope"}}
    return {"original_max_position_embeddings": 4096} | raw


def weights(config: TargetConfig) -> Weights:
    fused = {}
    for i in range(config.num_layers):
        source, layer = f"model.layers.{i}", f"layers.{i}"
        fused[f"{layer}.qkv.weight"] = Weight((f"{source}.self_attn.qkv_proj.weight",), order_heads(config))
        fused[f"{layer}.gate_up.weight"] = Weight((f"{source}.mlp.gate_up_proj.weight",))
    return decoder_weights(config) | fused


def gguf_config(field: GgufField) -> HFConfig:
    return {
        "sliding_window": field("attention.sliding_window") or None,
        "original_max_position_embeddings": field("rope.scaling.original_context_length") or field("context_length"),
    }


GGUF = Gguf("phi3", own_config=gguf_config)
PHI3 = Family("phi3", "Phi-3, Phi-3.5, Phi-4-mini", own_fields, weights, usual_terms, GGUF, partial_rope=True)
