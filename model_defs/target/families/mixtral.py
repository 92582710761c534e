"""Mixtral: Mistral's layers with a mixture of experts instead of the MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    return {
        "qkv_bias": False,
        "window": active_window(raw),
        "experts": Experts(raw["num_local_experts"], raw["num_experts_per_tok"], normalized=True),
    }


def usual_terms(raw: HFConfig) -> HFConfig:
    return {"rope_theta": 1_000_000.0} | raw


def weights(config: TargetConfig) -> Weights:
    return expert_weights(config, "block_sparse_moe", "w1", "w3", "w2")


def gguf_config(field: GgufField) -> HFConfig:
    return {"num_local_experts": field("expert_count"), "num_experts_per_tok": field("expert_used_count")}


GGUF = Gguf("llama", turned=True, own_config=gguf_config)
MIXTRAL = Family("mixtral", "Mixtral", own_fields, weights, usual_terms, GGUF, reads=("num_local_experts",))
