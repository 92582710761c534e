"""The configuration of a GGUF file in Hugging Face's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from redraft.compiler.checkpoints.gguf_tokenizer import TEXTS
from redraft.compiler.checkpoints.source import FetchError
from redraft.model_defs.target.bounds import shown
from redraft.model_defs.target.families.base import Family, GgufField, HFConfig
from redraft.model_defs.target.families.registry import FAMILIES, SUPPORTED
from redraft.model_defs.target.rope import RopeConfig
from redraft.model_defs.weights.gguf import LLAMA3_DIVISORS, LONG, SHORT

TOKENS = {"bos_token_id": "bos", "pad_token_id": "padding"}
ENDS = ("eos", "eot", "eom")
END_TEXTS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
)
"""What tokens that end a text, a turn or a message are called in the vocabularies of our families."""


NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_length"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "expert_shared_count"), (0,)),
    **dict.fromkeys(("leading_dense_block_count", "rope.scaling.yarn_log_multiplier", "expert_group_count"), (0, 1)),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), (0, 1)),
    "attention.scale": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "expert_gating_func": (0, 1),
}
"""Fields by which models compute otherwise, without the architecture, and the values that change nothing"""


def token_field(kind: str) -> str:
    """The field that holds the id of the token of a kind, such as eos."""
    return f"tokenizer.ggml.{kind}_token_id"


def family_of_file(architecture: str | None, fields: Mapping[str, Any]) -> Family:
    """The family of a file. Mixtral is called Llama there, and has experts. Raises FetchError for an unknown one."""
    families = [family for family in FAMILIES.values() if family.gguf and family.gguf.architecture == architecture]
    if not families:
        architectures = ", ".join(sorted({family.gguf.architecture for family in FAMILIES.values() if family.gguf}))
        raise FetchError(
            f"unsupported model: GGUF architecture {architecture!r}, expected {architectures}. Supported: {SUPPORTED}."
        )
    return families[-1] if fields.get(f"{architecture}.expert_count") else families[0]


def hf_config(family: Family, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> HFConfig:
    """`config.json` of a file with these fields and with these tensors for RoPE, meta ones for the others.

    Raises FetchError for a feature that is not supported, or KeyError (a missing field).
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert family.gguf
    architecture = family.gguf.architecture

    asked: set[str] = set()

    def field(name: str) -> Any:
        asked.add(name)
        whole = f"{architecture}.{name}"
        expected, kind = ("a text", str) if name == "rope.scaling.type" else ("a number", (int, float))
        if (value := fields.get(whole)) is not None and not isinstance(value, kind):
            raise FetchError(f"unsupported model: {whole} is {shown(value)}, expected {expected}")
        return value

    def needed(name: str) -> Any:
        if (value := field(name)) is None:
            raise KeyError(f"{architecture}.{name}")
        if not value > 0:
            raise FetchError(f"unsupported model: {architecture}.{name} is {value}, expected more than 0")
        return value

    heads = needed("attention.head_count")
    if heads > needed("embedding_length"):
        raise FetchError(
            f"unsupported model: {heads} heads, as {architecture}.attention.head_count says, in "
            f"{needed('embedding_length')} columns"
        )
    config = {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]],
        "model_type": family.model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": needed("embedding_length"),
        "intermediate_size": needed("feed_forward_length"),
        "num_hidden_layers": needed("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv") or heads,
        "head_dim": field("attention.key_length") or needed("embedding_length") // heads,
        "max_position_embeddings": needed("context_length"),
        "rms_norm_eps": needed("attention.layer_norm_rms_epsilon"),
        "rope_theta": float(field("rope.freq_base") or 10_000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "sliding_window": field("attention.sliding_window"),
        **_share(field, needed("embedding_length") // heads),
        **{key: token for key, kind in TOKENS.items() if (token := token_of(fields, kind)) is not None},
        "eos_token_id": end_ids(fields) or None,
    }
    if (size := field("attention.value_length")) not in (None, config["head_dim"]):
        raise FetchError(f"unsupported model: values of size {size} beside keys of size {config['head_dim']}")
    asked.clear()
    own_fields = family.gguf.own_config(field)
    for name, neutral in NEUTRAL.items():
        if name in asked:
            continue
        if (value := fields.get(f"{architecture}.{name}")) is not None and value not in neutral:
            raise FetchError(
                f"unsupported model: {architecture}.{name} is {shown(value)}, expected {' or '.join(map(str, neutral))}"
            )
    if (
        config["sliding_window"]
        and "sliding_window" not in own_fields
        and config["sliding_window"] < needed("context_length")
    ):
        raise FetchError(
            f"unsupported model: an active sliding window of {config['sliding_window']} tokens in a GGUF file of "
            f"{family.title}. Supported: {SUPPORTED}."
        )
    return config | own_fields | {"rope_scaling": _scaling(field, tensors, config["rope_theta"])}


def _share(field: GgufField, size: int) -> dict[str, float]:
    """The part of a head that is rotated, where it is not all of it."""
    size = field("attention.key_length") or size
    rotated = field("rope.dimension_count") or size
    return {} if rotated == size else {"partial_rotary_factor": rotated / size}


def token_of(fields: Mapping[str, Any], kind: str) -> int | None:
    """The id of the token of a kind, if the file names one. Raises FetchError."""
    token = fields.get(token_field(kind))
    if token is not None and type(token) is not int:
        raise FetchError(f"unsupported model: {token_field(kind)} is {shown(token)}, expected a token's id")
    return token


def end_ids(fields: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer, the file's own end token first.

    Files name one or two of them, and chats of some models end with another: those of Gemma 3 with `<end_of_turn>`. So
    tokens are ends by their text too, as they are for llama.cpp. What the file calls its unknown token is none: SmolLM2
    has `<|endoftext|>` as that.
    """
    named = [token for kind in ENDS if (token := token_of(fields, kind)) is not None]
    unknown = token_of(fields, "unknown")
    called = [token for token, text in enumerate(fields.get(TEXTS, ())) if text in END_TEXTS and token != unknown]
    return list(dict.fromkeys(named + called))


def _scaling(field: GgufField, tensors: Mapping[str, Tensor], theta: float) -> dict[str, Any] | None:
    """RoPE's scaling in Hugging Face's terms; None where there is none. Raises FetchError."""
    if LLAMA3_DIVISORS in tensors:
        return _llama3(tensors[LLAMA3_DIVISORS], theta)
    if LONG in tensors:
        return {
            "rope_type": "longrope",
            "short_factor": tensors[SHORT].tolist(),
            "long_factor": tensors[LONG].tolist(),
            "factor": field("context_length") / (field("rope.scaling.original_context_length") or 4096),
            "attention_factor": field("rope.scaling.attn_factor"),
        }
    kind = field("rope.scaling.type") or "linear"
    factor = float(field("rope.scaling.factor") or field("rope.scale_linear") or 1.0)  # the latter in files of 2023
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": field("rope.scaling.original_context_length"),
            "beta_fast": field("rope.scaling.yarn_beta_fast"),
            "beta_slow": field("rope.scaling.yarn_beta_slow"),
            "attention_factor": field("rope.scaling.yarn_attn_factor"),
        }
    return scaling


def _llama3(divisors: Tensor, theta: float) -> dict[str, Any]:
    """Llama 3's scaling parameters from the divisors [head_size / 2] that a GGUF file stores instead of them."""
    factor = float(divisors.max())
    parameters = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    size = 2 * divisors.numel()
    scaled = RopeConfig(theta=theta, type="llama3", factor=factor).inverse_frequencies(size)
    plain = RopeConfig(theta=theta).inverse_frequencies(size)
    if not torch.allclose(plain / scaled, divisors, rtol=1e-3):
        raise FetchError(f"unsupported model: RoPE divisors that are not Llama 3's. Supported: {SUPPORTED}.")
    return parameters
