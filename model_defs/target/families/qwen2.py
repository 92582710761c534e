"""Qwen2 and Qwen2.5: Llama's layers with biases on the query, key and value projections.

The configuration always names a sliding window; `use_sliding_window` says whether it is active, and `layer_types` or
`max_window_layers` for which layers.
"""

from __future__ import annotations

from typing import Any

from redraft.model_defs.target.families.base import (
    Attention,
    Family,
    Gguf,
    HFConfig,
    active_window,
    expect_silu,
    layers_of_type,
    refuse_biases,
)
from redraft.model_defs.target.rope import RopeConfig


def own_fields(raw: HFConfig) -> dict[str, Any]:
    expect_silu(raw)
    refuse_biases(raw)
    return {"qkv_bias": True, "others": sliding_layers(raw)}


def sliding_layers(raw: HFConfig) -> Attention | None:
    """The layers with a sliding window, if there are any."""
    window = active_window(raw) if raw.get("use_sliding_window", False) else None
    if window is None:
        return None
    if raw.get("layer_types"):
        layers = layers_of_type(raw, "sliding_attention")
    else:
        layers = tuple(range(raw.get("max_window_layers", 28), raw["num_hidden_layers"]))
    return Attention(RopeConfig.from_hf(raw), window, layers) if layers else None


QWEN2 = Family("qwen2", "Qwen2, Qwen2.5", own_fields, gguf=Gguf("qwen2"), reads=("layer_types",))
