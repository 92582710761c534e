"""Target configuration, read from a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redraft.model_defs.files import read_json
from redraft.model_defs.target.bounds import check_fields, end_ids, without_nulls, without_unread
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.families.base import Attention, Experts, Family
from redraft.model_defs.target.families.registry import SUPPORTED, family_of
from redraft.model_defs.target.rope import NONE, RopeConfig


@dataclass(frozen=True)
class TargetConfig:
    """Shape and constants of one target: what its layers compute, whatever its family.

    Fields after `eos_token_ids` are features that only some families have; their defaults are Llama's.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Columns of the MLP, or of one expert"""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    """The epsilon of all norms, LayerNorm too"""
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    eos_token_ids: tuple[int, ...]
    family: str = "llama"
    """The architecture by its name in `config.json`, which decides how the weights are called"""
    window: int | None = None
    """See `Attention.window`"""
    others: Attention | None = None
    """Layers that attend otherwise than by `rope` and `window`"""
    qk_norm: bool = False
    """Whether each query head and key head has an RMS norm before RoPE"""
    query_scale: float = 1.0
    """What scores are multiplied by beside head_size^-0.5; weights have it in their queries, or in the norm of these,
    once they are read"""
    sandwich_norms: bool = False
    """Whether what attention and MLP give is normalized too, before it is added"""
    layer_norm: bool = False
    """LayerNorm with biases instead of RMS norm"""
    activation: str = "silu"
    """silu, gelu (its tanh approximation) or relu"""
    gated: bool = True
    """Whether the MLP's activation is multiplied with a second projection"""
    output_bias: bool = False
    """Whether the MLP and attention's output projection have biases"""
    embedding_scale: float = 1.0
    """What embeddings are multiplied by where they enter the layers"""
    block_scale: float = 1.0
    logit_divisor: float = 1.0
    """What attention's and MLP's outputs are multiplied by, and logits are divided by; weights have it once they are
    read"""
    learned_positions: bool = False
    """Whether an embedding of the position is added to the token's"""
    experts: Experts | None = None
    float32_norms: bool = False
    """Whether norms stay in float32 in a target of 16 bits, which would round their weights, 1 + what is stored"""

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The kinds of attention that the layers have: the usual one, and the other where there is one."""
        usual = Attention(self.rope, self.window)
        return (usual,) if self.others is None else (usual, self.others)

    def attention_of(self, layer: int) -> int:
        """Which of `attentions` a layer has."""
        return int(self.others is not None and layer in self.others.layers)

    def window_of(self, layer: int) -> int | None:
        """See `Attention.window`."""
        return self.attentions[self.attention_of(layer)].window

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """The layers with a window."""
        return tuple(layer for layer in range(self.num_layers) if self.window_of(layer))

    def for_layers(self, count: int) -> TargetConfig:
        """The configuration of a drafter's `count` layers of this size: dense, with RoPE in all of them. They
        are trained in short windows, so of LongRoPE they have the factors for short contexts."""
        rope = replace(self.rope, type="default") if self.rope.type == NONE else self.rope
        rope = replace(rope, long_divisors=rope.short_divisors)
        return replace(self, num_layers=count, rope=rope, others=None, learned_positions=False, experts=None)

    @classmethod
    def load(cls, folder: Path, raw: dict[str, Any] | None = None) -> TargetConfig:
        """Read `config.json`, or what is given as `raw` of it, and `generation_config.json`'s end tokens of a model
        folder.

        Raises UnsupportedModelError with the families that there are, FileNotFoundError when there is no `config.json`,
        or ValueError when it is not JSON, lacks a field or has one that no model has.
        """
        raw = dict(raw) if raw is not None else read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.exists():
            ends = read_json(generation).get("eos_token_id")
            raw |= {} if ends is None else {"eos_token_id": ends}
        try:
            return cls.from_hf(raw)
        except KeyError as missing:
            raise ValueError(f"{folder / 'config.json'}: field {missing} is missing") from None
        except UnsupportedModelError as refusal:
            raise UnsupportedModelError(refusal.found, SUPPORTED) from None
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: {error}") from None

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> TargetConfig:
        """Translate a Hugging Face configuration. Raises UnsupportedModelError, KeyError (a missing field) or
        ValueError."""
        family = family_of(raw.get("model_type"))
        try:
            return cls._of_family(family, raw)
        except (TypeError, AttributeError, IndexError, ArithmeticError) as error:
            raise ValueError(f"a field has another type or size than models have ({error})") from error

    @classmethod
    def _of_family(cls, family: Family, raw: dict[str, Any]) -> TargetConfig:
        raw = without_nulls(raw)
        raw = without_unread(raw, family.reads)
        check_fields(raw)
        raw = family.usual_terms(raw)
        check_fields(raw)
        rope = RopeConfig.from_hf(raw)
        original = {"original_max_position_embeddings": rope.original_max_position} if rope.type == "yarn" else {}
        raw = {**raw, **original, "max_position_embeddings": rope.reach(raw["max_position_embeddings"])}
        num_heads = raw["num_attention_heads"]
        num_kv_heads = raw.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(f"{num_heads} heads, which {num_kv_heads} KV heads cannot share evenly")
        head_size = raw.get("head_dim") or raw["hidden_size"] // num_heads
        shared = {
            "vocab_size": raw["vocab_size"],
            "hidden_size": raw["hidden_size"],
            "intermediate_size": raw["intermediate_size"],
            "num_layers": raw["num_hidden_layers"],
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
            "rms_norm_eps": raw["rms_norm_eps"],
            "rope": rope,
            "max_position": raw["max_position_embeddings"],
            "tie_embeddings": raw.get("tie_word_embeddings", False),
            "eos_token_ids": end_ids(raw.get("eos_token_id")),
            "family": family.model_type,
        }
        config = cls(**shared | family.own_fields(raw))
        shares = {attention.rope.share for attention in config.attentions} - {None}
        if shares and not family.partial_rope:
            raise UnsupportedModelError(f"partial_rotary_factor {shares.pop()}, expected 1")
        if head_size % 2 or config.rope.rotated(head_size) % 2:
            raise UnsupportedModelError(f"heads of size {head_size}, whose elements RoPE cannot turn in pairs")
        for name, divisors in (("short_factor", rope.short_divisors), ("long_factor", rope.long_divisors)):
            if divisors is not None and len(divisors) != (pairs := rope.rotated(head_size) // 2):
                raise ValueError(f"LongRoPE's {name} has {len(divisors)} numbers, expected {pairs}, one for each pair")
        return config
