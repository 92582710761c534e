"""The shape of a drafter's layer that is not its target's: that of a checkpoint from the hub."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.families.base import active_window
from redraft.model_defs.target.rope import RopeConfig

FIELDS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor"),
    *("layer_types", "use_sliding_window", "sliding_window", "rope_dim", "rotary_dim"),
)
"""The fields of `config.json` that say a layer's shape"""
REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
ROPE_FIELDS = (
    *("type", "rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("truncate", "short_factor", "long_factor"),
)
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose layers are Llama's, but for biases, of which the tensors tell, and norms of heads."""
WITH_HEAD_NORMS = "qwen3"


@dataclass(frozen=True)
class LayerShape:
    """The shape of a Llama layer, or with `qk_norm` of a Qwen3 layer, whatever its target's layers are."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    """See `Attention.window`"""

    @classmethod
    def from_hf(cls, raw: dict[str, Any], qkv_bias: bool = False, windows: bool = False) -> Self:
        """Read the layers' `config.json`, where the form has them with `windows`, if it is one for all. Raises
        UnsupportedModelError for layers that are not Llama's, or KeyError."""
        raw = {name: raw[name] for name in FIELDS if name in raw or name in REQUIRED}
        for rope in ("rope_scaling", "rope_parameters"):
            if raw.get(rope):
                raw[rope] = {name: raw[rope][name] for name in ROPE_FIELDS if name in raw[rope]}
        kind = raw.get("model_type", LLAMA_LIKE[0])
        if kind not in LLAMA_LIKE:
            raise UnsupportedModelError(f"its layers are of model_type {kind!r}, read are {', '.join(LLAMA_LIKE)}")
        usual: dict[str, Any] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
        if kind == WITH_HEAD_NORMS:
            usual["head_dim"] = 128
        values = {name: value for name, value in raw.items() if value is not None}
        kinds, window = set(raw.get("layer_types") or ()), None
        if windows and kinds == {"sliding_attention"}:
            window = values.get("sliding_window")
            if not window:
                raise UnsupportedModelError("its layers attend to a sliding window, and sliding_window does not say it")
        elif "sliding_attention" in kinds and windows:
            raise UnsupportedModelError("some of its layers attend to a sliding window; read are those where all do")
        elif "sliding_attention" in kinds or raw.get("use_sliding_window") or _is_windowed_mistral(usual | values):
            raise UnsupportedModelError("its layers attend to a sliding window, which is not read in this form")
        if (activation := raw.get("hidden_act") or "silu") != "silu":
            raise UnsupportedModelError(f"its layers have hidden_act {activation!r}, expected 'silu'")
        kept = {name: value for name, value in values.items() if name not in ("sliding_window", "layer_types")}
        config = TargetConfig.from_hf(usual | kept | {"model_type": LLAMA_LIKE[0]})
        for name in ("rope_dim", "rotary_dim"):
            if values.get(name, config.head_size) != config.head_size:
                raise UnsupportedModelError(f"{name} {values[name]}, expected {config.head_size}, all of a head")
        shape = replace(cls.of(config), rope=config.rope)
        return replace(shape, qkv_bias=qkv_bias, qk_norm=has_head_norms(raw), window=window)

    @classmethod
    def of(cls, config: TargetConfig) -> Self:
        """The shape of a target's layers, as a Llama layer that is trained here."""
        return cls(
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            config.rms_norm_eps,
            config.for_layers(1).rope,
            config.max_position,
        )

    def config(self, hidden_size: int, vocab_size: int, num_layers: int = 1) -> TargetConfig:
        """The configuration of so many layers of this shape."""
        llama = TargetConfig.from_hf(
            {
                "model_type": LLAMA_LIKE[0],
                "vocab_size": vocab_size,
                "hidden_size": hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_hidden_layers": num_layers,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_size,
                "rms_norm_eps": self.rms_norm_eps,
                "max_position_embeddings": self.max_position,
            }
        )
        return replace(llama, rope=self.rope, qkv_bias=self.qkv_bias, qk_norm=self.qk_norm, window=self.window)


def _is_windowed_mistral(raw: dict[str, Any]) -> bool:
    return raw.get("model_type") == "mistral" and active_window(raw) is not None


def has_head_norms(raw: dict[str, Any]) -> bool:
    """Whether the layers of a `config.json` have norms of query and key heads."""
    return raw.get("model_type") == WITH_HEAD_NORMS
