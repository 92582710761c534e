"""Llama: no biases, full attention."""

from __future__ import annotations

from typing import Any

from redraft.model_defs.target.families.base import (
    Family,
    Gguf,
    HFConfig,
    expect_silu,
    refuse_biases,
    refuse_sliding_window,
)


def own_fields(raw: HFConfig) -> dict[str, Any]:
    expect_silu(raw)
    refuse_biases(raw)
    refuse_sliding_window(raw)
    return {"qkv_bias": False}


LLAMA = Family("llama", "Llama 2/3, Vicuna, SmolLM2", own_fields, gguf=Gguf("llama", turned=True))
