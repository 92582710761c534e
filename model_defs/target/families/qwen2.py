"""Qwen2 and Qwen2.5: Llama's layers with biases on the query, key and value projections.

The configuration always names a sliding window; `use_sliding_window` says whether it is active.
"""

from __future__ import annotations

from typing import Any

from model_defs.target.families.base import Family, HFConfig, refuse_biases, refuse_sliding_window


def own_fields(raw: HFConfig) -> dict[str, Any]:
    refuse_biases(raw)
    if raw.get("use_sliding_window", False):
        refuse_sliding_window(raw)
    return {"qkv_bias": True}


QWEN2 = Family("qwen2", "Qwen2 with full attention", own_fields)
