"""SmolLM3: Llama's layers; every fourth has no RoPE."""

from __future__ import annotations

from typing import Any

from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.families.base import (
    Attention,
    Family,
    Gguf,
    GgufField,
    HFConfig,
    active_window,
    expect_silu,
    refuse_biases,
)
from redraft.model_defs.target.rope import NONE, RopeConfig


def own_fields(raw: HFConfig) -> dict[str, Any]:
    expect_silu(raw)
    refuse_biases(raw)
    if raw.get("use_sliding_window") and active_window(raw):
        raise UnsupportedModelError("use_sliding_window true, expected false")
    count, interval = raw["num_hidden_layers"], raw.get("no_rope_layer_interval", 4)
    rotated = raw.get("no_rope_layers") or [(i + 1) % interval for i in range(count)]
    layers = tuple(i for i in range(count) if not rotated[i])
    return {"qkv_bias": False, "others": Attention(RopeConfig(type=NONE), None, layers) if layers else None}


def usual_terms(raw: HFConfig) -> HFConfig:
    return {"tie_word_embeddings": True, "rope_theta": 2_000_000.0} | raw


def gguf_config(field: GgufField) -> HFConfig:
    """llama.cpp's files do not say which layers have no RoPE: in its code it is every fourth."""
    return {"no_rope_layer_interval": 4}


GGUF = Gguf("smollm3", turned=True, own_config=gguf_config)
READS = ("no_rope_layer_interval",)
SMOLLM3 = Family("smollm3", "SmolLM3", own_fields, usual_terms=usual_terms, gguf=GGUF, reads=READS)
