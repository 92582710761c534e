"""Mistral: Llama's layers. Version 0.1 attends to a sliding window, later ones to everything."""

from __future__ import annotations

from typing import Any

from model_defs.target.families.base import Family, HFConfig, refuse_biases, refuse_sliding_window


def own_fields(raw: HFConfig) -> dict[str, Any]:
    refuse_biases(raw)
    refuse_sliding_window(raw)
    return {"qkv_bias": False}


MISTRAL = Family("mistral", "Mistral with full attention", own_fields)
