"""Target configuration, read from a Hugging Face `config.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_defs.files import read_json

SUPPORTED = (
    "Llama 2/3, Vicuna, SmolLM2 (model_type llama), Mistral with full attention (mistral) and "
    "Qwen2 with full attention (qwen2); RoPE types default, linear and llama3; SiLU MLPs"
)
_FAMILIES = ("llama", "mistral", "qwen2")
_ROPE_TYPES = ("default", "linear", "llama3")


class UnsupportedModelError(ValueError):
    """The checkpoint needs an architecture or feature that the target definition lacks."""

    def __init__(self, found: str):
        super().__init__(f"unsupported model: {found}. Supported: {SUPPORTED}.")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, with the scaling variants in use."""

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self, head_size: int) -> Tensor:
        """float32 [head_size / 2], in radians per position."""
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        frequencies = 1.0 / self.theta**exponents
        if self.type == "linear":
            return frequencies / self.factor
        if self.type == "llama3":
            wavelengths = 2 * math.pi / frequencies
            turns = self.original_max_position / wavelengths
            smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            smooth = smooth.clamp(0.0, 1.0)
            return (1 - smooth) * frequencies / self.factor + smooth * frequencies
        return frequencies


@dataclass(frozen=True)
class TargetConfig:
    """Shape and constants of one target of the Llama family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, folder: Path) -> TargetConfig:
        """Read `config.json` (and `generation_config.json`'s end tokens) of a model folder.

        Raises UnsupportedModelError, FileNotFoundError when there is no `config.json`, or ValueError
        when it is not JSON or lacks a field.
        """
        raw = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.exists():
            raw |= {key: value for key, value in read_json(generation).items() if key == "eos_token_id"}
        try:
            return cls.from_hf(raw)
        except KeyError as missing:
            raise ValueError(f"{folder / 'config.json'}: field {missing} is missing") from None

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> TargetConfig:
        """Translate a Hugging Face configuration. Raises UnsupportedModelError, or KeyError (a missing field)."""
        family = raw.get("model_type")
        if family not in _FAMILIES:
            raise UnsupportedModelError(f"model_type {family!r}")
        if raw.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(f"hidden_act {raw['hidden_act']!r}")
        for flag in ("attention_bias", "mlp_bias"):
            if raw.get(flag):
                raise UnsupportedModelError(f"{flag} true")
        quantization = (raw.get("quantization_config") or {}).get("quant_method")
        if quantization not in (None, "gguf"):
            raise UnsupportedModelError(f"pre-quantized weights ({quantization})")
        max_position = raw["max_position_embeddings"]
        window = raw.get("sliding_window")
        sliding = raw.get("use_sliding_window", False) if family == "qwen2" else window is not None
        if sliding and window is not None and window < max_position:
            raise UnsupportedModelError(f"an active sliding window of {window} tokens")
        num_heads = raw["num_attention_heads"]
        num_kv_heads = raw.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(f"{num_heads} heads, which {num_kv_heads} KV heads cannot share evenly")
        head_size = raw.get("head_dim") or raw["hidden_size"] // num_heads
        if head_size % 2:
            raise UnsupportedModelError(f"heads of size {head_size}, whose elements RoPE cannot turn in pairs")
        eos = raw.get("eos_token_id")
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            rms_norm_eps=raw["rms_norm_eps"],
            rope=_rope_from_hf(raw),
            max_position=max_position,
            tie_embeddings=raw.get("tie_word_embeddings", False),
            qkv_bias=family == "qwen2",
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )


def _rope_from_hf(raw: dict[str, Any]) -> RopeConfig:
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise UnsupportedModelError(f"RoPE type {kind!r}")
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("a partial rotary factor")
    return RopeConfig(
        theta=scaling.get("rope_theta", raw.get("rope_theta", 10000.0)),
        type=kind,
        factor=scaling.get("factor", 1.0),
        low_freq_factor=scaling.get("low_freq_factor", 1.0),
        high_freq_factor=scaling.get("high_freq_factor", 4.0),
        original_max_position=scaling.get("original_max_position_embeddings", raw["max_position_embeddings"]),
    )
