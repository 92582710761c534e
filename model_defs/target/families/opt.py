"""OPT: learned positions, LayerNorm, an MLP of two matrices with ReLU, biases everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.families.base import Family, HFConfig, Weight, Weights
from redraft.model_defs.target.rope import NONE, RopeConfig

if TYPE_CHECKING:
    from redraft.model_defs.target.config import TargetConfig

OFFSET = 2
"""The row of the table of positions that is the first position's."""
EXPECTED = {
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
    "activation_function": "relu",
}


def own_fields(raw: HFConfig) -> dict[str, Any]:
    for field, expected in EXPECTED.items():
        if (value := raw.get(field, expected)) != expected:
            raise UnsupportedModelError(f"{field} {value!r}, expected {expected!r}")
    if (width := raw.get("word_embed_proj_dim") or raw["hidden_size"]) != raw["hidden_size"]:
        raise UnsupportedModelError(f"word_embed_proj_dim {width}, expected {raw['hidden_size']}")
    return {
        "rope": RopeConfig(type=NONE),
        "qkv_bias": True,
        "layer_norm": True,
        "activation": "relu",
        "gated": False,
        "output_bias": True,
        "learned_positions": True,
    }


def usual_terms(raw: HFConfig) -> HFConfig:
    return {"tie_word_embeddings": True, "rms_norm_eps": 1e-5} | raw | {"intermediate_size": raw["ffn_dim"]}


def weights(config: TargetConfig) -> Weights:
    decoder = "model.decoder"
    read = {
        "embedding.weight": Weight((f"{decoder}.embed_tokens.weight",)),
        "positions.weight": Weight((f"{decoder}.embed_positions.weight",), lambda table: table[OFFSET:]),
    }
    if not config.tie_embeddings:
        read["lm_head.weight"] = Weight(("lm_head.weight",))
    for kind in ("weight", "bias"):
        read[f"norm.{kind}"] = Weight((f"{decoder}.final_layer_norm.{kind}",))
        for i in range(config.num_layers):
            source, layer = f"{decoder}.layers.{i}", f"layers.{i}"
            projections = tuple(f"{source}.self_attn.{p}_proj.{kind}" for p in "qkv")
            read[f"{layer}.qkv.{kind}"] = Weight(projections)
            for ours, theirs in (
                ("attention_out", "self_attn.out_proj"),
                ("up", "fc1"),
                ("down", "fc2"),
                ("attention_norm", "self_attn_layer_norm"),
                ("mlp_norm", "final_layer_norm"),
            ):
                read[f"{layer}.{ours}.{kind}"] = Weight((f"{source}.{theirs}.{kind}",))
    return read


OPT = Family("opt", "OPT", own_fields, weights, usual_terms, reads=("activation_function",))
