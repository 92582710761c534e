"""Target configuration, read from a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_defs.files import read_json
from model_defs.target.errors import UnsupportedModelError
from model_defs.target.families.registry import family_of
from model_defs.target.rope import RopeConfig


@dataclass(frozen=True)
class TargetConfig:
    """Shape and constants of one target: what its layers compute, whatever its family."""

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
        family = family_of(raw.get("model_type"))
        if raw.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(f"hidden_act {raw['hidden_act']!r}, expected 'silu'")
        quantization = (raw.get("quantization_config") or {}).get("quant_method")
        if quantization not in (None, "gguf"):
            raise UnsupportedModelError(f"pre-quantized weights ({quantization}), expected float weights or a GGUF")
        num_heads = raw["num_attention_heads"]
        num_kv_heads = raw.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(f"{num_heads} heads, which {num_kv_heads} KV heads cannot share evenly")
        head_size = raw.get("head_dim") or raw["hidden_size"] // num_heads
        if head_size % 2:
            raise UnsupportedModelError(f"heads of size {head_size}, whose elements RoPE cannot turn in pairs")
        eos = raw.get("eos_token_id")
        shared = {
            "vocab_size": raw["vocab_size"],
            "hidden_size": raw["hidden_size"],
            "intermediate_size": raw["intermediate_size"],
            "num_layers": raw["num_hidden_layers"],
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
            "rms_norm_eps": raw["rms_norm_eps"],
            "rope": RopeConfig.from_hf(raw),
            "max_position": raw["max_position_embeddings"],
            "tie_embeddings": raw.get("tie_word_embeddings", False),
            "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        }
        return cls(**shared | family.own_fields(raw))
