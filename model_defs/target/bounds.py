"""What fields of a Hugging Face configuration may be: a hostile or damaged one is refused before it is used."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from redraft.model_defs.target.errors import UnsupportedModelError

COUNTS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "head_dim": 1 << 12,
    "max_position_embeddings": 1 << 28,
    "original_max_position_embeddings": 1 << 28,
    "ffn_dim": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12,
    "no_rope_layer_interval": 1 << 10,
}
"""Whole numbers from 1 to a maximum, some ten times what models have"""
FROM_ZERO = {"sliding_window": 1 << 40, "max_window_layers": 1 << 10, "sliding_window_pattern": 1 << 10}
"""Whole numbers from 0 to a maximum"""
MOST_EXPERTS = 1 << 17
"""Experts of all layers together"""
FLAGS = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob"),
    *("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine", "_remove_final_layer_norm"),
)
SCALES = {
    *("query_pre_attn_scalar", "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
}
"""Numbers that scale what a model computes"""
TABLES = ("rope_parameters", "rope_scaling", "quantization_config")
OF_LAYERS = ("layer_types", "no_rope_layers")
"""Lists with an entry for each layer"""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "attn_bias", "qkv_proj_bias"), (False,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logit_softcapping"), (0,)),
    **dict.fromkeys(("attn_logit_softcap", "final_logit_softcap", "logits_soft_cap"), (0,)),
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), (1,)),
    **dict.fromkeys(
        ("lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier"), (1,)
    ),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "scale_depth", "dim_model_base", "clip_qkv"), ()),
    **dict.fromkeys(("scale_emb", "embedding_scale", "rotary_pct"), (1,)),
    **dict.fromkeys(("scale_embedding", "qk_layernorm", "use_qk_norm", "qk_norm", "alibi"), (False,)),
    **dict.fromkeys(("use_parallel_residual", "parallel_attn", "rope_interleaved", "rope_interleave"), (False,)),
    **dict.fromkeys(("use_bidirectional_attention", "attn_temperature_tuning", "attn_output_gate"), (False,)),
    **dict.fromkeys(("apply_residual_connection_post_layernorm", "scale_attn_by_inverse_layer_idx"), (False,)),
    **dict.fromkeys(("is_causal", "scale_attn_weights"), (True,)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), (0,)),
    **dict.fromkeys(("num_kv_shared_layers", "hidden_size_per_layer_input", "no_rope_layer_interval"), (0,)),
    **dict.fromkeys(("attention_chunk_size", "kv_lora_rank", "q_lora_rank", "sliding_window_pattern"), (0,)),
    "hidden_activation": ("silu",),
    "activation_function": ("silu",),
}
"""Fields by which models of some families compute otherwise, and the values, beside null, that change nothing. A family
that has one of them lists it in `Family.reads`."""
HEAD_NORMS = ("qk_layernorm", "use_qk_norm", "qk_norm")
"""Those that families whose heads always have norms read: Qwen3-Coder's files say `use_qk_norm`"""
ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale"),
    *("mscale_all_dim", "short_factor", "long_factor"),
    *("max_position_embeddings", "finetuned", "mrope_section", "mrope_interleaved"),
}
"""Fields of RoPE's parameters: those that are read, and four that change nothing for texts"""


def shown(value: object) -> str:
    """A value as a message shows it: in a line, and not all of a long one."""
    return reprlib.repr(value)


def is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without numbers that are null, for which the usual ones stand."""
    return {name: value for name, value in raw.items() if value is not None or name not in (*COUNTS, "rms_norm_eps")}


def check_fields(raw: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the field, for a value that no model has. Null stands for the usual value."""
    values = {name: value for name, value in raw.items() if value is not None}
    for name, value in values.items():
        least, most = (1, COUNTS[name]) if name in COUNTS else (0, FROM_ZERO.get(name))
        if most is not None and (type(value) is not int or not least <= value <= most):
            raise ValueError(f"{name} is {shown(value)}, expected a whole number from {least} to {most}")
        if name in FLAGS and type(value) is not bool:
            raise ValueError(f"{name} is {shown(value)}, expected true or false")
        if name in TABLES and not isinstance(value, Mapping):
            raise ValueError(f"{name} is {shown(value)}, expected an object")
        if name in OF_LAYERS and (not isinstance(value, list) or len(value) < raw["num_hidden_layers"]):
            raise ValueError(f"{name} is {shown(value)}, expected a list with an entry for each layer")
    require_number("rms_norm_eps", values.get("rms_norm_eps", 0), 0, 1)
    for name in SCALES & values.keys():
        require_number(name, values[name], 1e-6, 1e6)
    experts = values.get("num_experts") or values.get("num_local_experts") or 0
    if experts * raw["num_hidden_layers"] > MOST_EXPERTS:
        raise ValueError(
            f"{experts} experts in {raw['num_hidden_layers']} layers, expected at most {MOST_EXPERTS} in all"
        )


def require_number(name: str, value: object, least: float, most: float) -> None:
    """Raise ValueError for anything but a number within these bounds."""
    if not is_number(value) or not least <= float(value) <= most:  # type: ignore[arg-type]
        raise ValueError(f"{name} is {shown(value)}, expected a number from {least:g} to {most:g}")


def end_ids(value: object) -> tuple[int, ...]:
    """`eos_token_id`, which may be null, an id or a list of them. Raises ValueError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < COUNTS["vocab_size"] for token in ids):
        raise ValueError(f"eos_token_id is {shown(value)}, expected a token's id or a list of them")
    return tuple(ids)


def without_unread(raw: Mapping[str, Any], reads: Iterable[str]) -> dict[str, Any]:
    """The configuration without fields that change nothing in a family that does not have them. Raises
    UnsupportedModelError for one that changes what a model computes."""
    unread = NEUTRAL.keys() - set(reads)
    for name, neutral in NEUTRAL.items():
        if (value := raw.get(name)) is not None and name in unread and value not in neutral:
            expected = " or ".join(map(str, (*neutral, None))).replace("None", "none")
            raise UnsupportedModelError(f"{name} {shown(value)}, expected {expected}")
    kinds = raw.get("layer_types")
    kinds = kinds if isinstance(kinds, list) and "layer_types" not in reads else []
    if others := [kind for kind in kinds if kind != "full_attention"]:
        raise UnsupportedModelError(f"layer_types with {shown(others[0])}, expected only 'full_attention'")
    return {name: value for name, value in raw.items() if name not in unread}
