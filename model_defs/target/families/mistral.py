"""Mistral: Llama's layers. Version 0.1 attends to a sliding window, later ones to everything."""

from __future__ import annotations

from typing import Any

from redraft.model_defs.target.families.base import Family, HFConfig, active_window, expect_silu, refuse_biases


def own_fields(raw: HFConfig) -> dict[str, Any]:
    expect_silu(raw)
    refuse_biases(raw)
    return {"qkv_bias": False, "window": active_window(raw)}


def usual_terms(raw: HFConfig) -> HFConfig:
    return {"sliding_window": 4096} | raw


MISTRAL = Family("mistral", "Mistral", own_fields, usual_terms=usual_terms)
