"""Granite 3: Llama's layers with four multipliers, of embeddings, scores, what blocks add, and logits.

All but the embeddings' become part of the weights. Where the head is the embedding, the embedding is divided for the
logits, and what enters the layers is multiplied by as much again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from redraft.model_defs.target.families.base import (
    Family,
    Gguf,
    GgufField,
    HFConfig,
    Weight,
    Weights,
    decoder_weights,
    expect_silu,
    refuse_biases,
)

if TYPE_CHECKING:
    from redraft.model_defs.target.config import TargetConfig


MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def own_fields(raw: HFConfig) -> dict[str, Any]:
    expect_silu(raw)
    refuse_biases(raw)
    head_size = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    divided = raw["logits_scaling"] if raw.get("tie_word_embeddings") else 1.0
    return {
        "qkv_bias": False,
        "query_scale": raw["attention_multiplier"] * head_size**0.5,
        "embedding_scale": raw["embedding_multiplier"] * divided,
        "block_scale": raw["residual_multiplier"],
        "logit_divisor": raw["logits_scaling"],
    }


def usual_terms(raw: HFConfig) -> HFConfig:
    return dict.fromkeys(MULTIPLIERS, 1.0) | raw


def weights(config: TargetConfig) -> Weights:
    queries = config.num_heads * config.head_size

    def scaled(weight: Tensor, scale: float) -> Tensor:
        return weight.float() * scale

    def scale_queries(weight: Tensor) -> Tensor:
        return torch.cat([weight[:queries].float() * config.query_scale, weight[queries:].float()])

    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "qkv": scale_queries,
        "attention_out": partial(scaled, scale=config.block_scale),
        "down": partial(scaled, scale=config.block_scale),
        "embedding" if config.tie_embeddings else "lm_head": partial(scaled, scale=1 / config.logit_divisor),
    }
    return {
        name: Weight(weight.sources, changes.get(name.split(".")[-2], weight.change))
        for name, weight in decoder_weights(config).items()
    }


def gguf_config(field: GgufField) -> HFConfig:
    """Files leave out what is 1."""
    read = {
        "embedding_multiplier": field("embedding_scale"),
        "attention_multiplier": field("attention.scale"),
        "residual_multiplier": field("residual_scale"),
        "logits_scaling": field("logit_scale"),
    }
    return {name: value for name, value in read.items() if value is not None}


GGUF = Gguf("granite", turned=True, own_config=gguf_config)
GRANITE = Family("granite", "Granite 3", own_fields, weights, usual_terms, GGUF, reads=MULTIPLIERS)
