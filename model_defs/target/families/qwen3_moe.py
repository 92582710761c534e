"""Qwen3-MoE: Qwen3's layers with a mixture of experts instead of the MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redraft.model_defs.target.bounds import HEAD_NORMS
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.families.base import (
    Experts,
    Family,
    Gguf,
    GgufField,
    HFConfig,
    Weights,
    active_window,
    expect_silu,
    expert_weights,
    refuse_biases,
)

if TYPE_CHECKING:
    from redraft.model_defs.target.config import TargetConfig


def own_fields(raw: HFConfig) -> dict[str, Any]:
    expect_silu(raw)
    refuse_biases(raw)
    if (step := raw.get("decoder_sparse_step", 1)) != 1:
        raise UnsupportedModelError(f"decoder_sparse_step {step}, expected 1")
    if layers := raw.get("mlp_only_layers"):
        raise UnsupportedModelError(f"mlp_only_layers {layers}, expected experts in every layer")
    count = raw.get("num_experts") or raw["num_local_experts"]
    return {
        "intermediate_size": raw["moe_intermediate_size"],
        "qkv_bias": False,
        "qk_norm": True,
        "window": active_window(raw) if raw.get("use_sliding_window") else None,
        "experts": Experts(count, raw["num_experts_per_tok"], bool(raw.get("norm_topk_prob", False))),
    }


def weights(config: TargetConfig) -> Weights:
    return expert_weights(config, "mlp", "gate_proj", "up_proj", "down_proj")


def gguf_config(field: GgufField) -> HFConfig:
    return {
        "moe_intermediate_size": field("expert_feed_forward_length"),
        "num_experts": field("expert_count"),
        "num_experts_per_tok": field("expert_used_count"),
        "norm_topk_prob": True,
    }


GGUF = Gguf("qwen3moe", own_config=gguf_config)
READS = ("num_experts", "num_local_experts", *HEAD_NORMS)
QWEN3_MOE = Family("qwen3_moe", "Qwen3-MoE", own_fields, weights, gguf=GGUF, reads=READS)
