"""Qwen3: Llama's layers with an RMS norm of each query and key head, whose size is a setting of its own."""

from __future__ import annotations

from typing import Any

from redraft.model_defs.target.bounds import HEAD_NORMS
from redraft.model_defs.target.families.base import Family, Gguf, HFConfig, expect_silu, refuse_biases
from redraft.model_defs.target.families.qwen2 import sliding_layers


def own_fields(raw: HFConfig) -> dict[str, Any]:
    expect_silu(raw)
    refuse_biases(raw)
    return {"qkv_bias": False, "qk_norm": True, "others": sliding_layers(raw)}


def usual_terms(raw: HFConfig) -> HFConfig:
    return {"head_dim": 128} | raw


READS = ("layer_types", *HEAD_NORMS)
QWEN3 = Family("qwen3", "Qwen3", own_fields, usual_terms=usual_terms, gguf=Gguf("qwen3"), reads=READS)
