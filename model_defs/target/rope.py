"""Rotary position embedding: its constants, and the scaling variants in use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redraft.model_defs.target.bounds import ROPE_FIELDS, require_number
from redraft.model_defs.target.errors import UnsupportedModelError

TYPE, NONE = "rope_type", "none"
"""The field of the type, and the type of layers that do not rotate."""
TYPES = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
WRITTEN = ("default", "linear", "llama3")
"""Types that are written to others' configurations"""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, with the scaling variants in use.

    Fields from `share` on are None where a variant does not have them.
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    share: float | None = None
    """The part of a head's elements that is rotated; None: all"""
    attention_factor: float | None = None
    """What cosines and sines are multiplied by (YaRN, LongRoPE)"""
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    """YaRN: turns over the original context at which interpolation begins and ends, and whether these bounds are
    rounded to whole pairs"""
    short_divisors: tuple[float, ...] | None = None
    long_divisors: tuple[float, ...] | None = None
    """LongRoPE: what each frequency is divided by, for contexts up to the original one and beyond it"""

    def rotated(self, head_size: int) -> int:
        """How many elements of a head are rotated."""
        return head_size if self.share is None else int(head_size * self.share)

    def inverse_frequencies(self, head_size: int, context: int = 0) -> Tensor:
        """float32 [head_size / 2], in radians per position; zeros for pairs that are not rotated. `context` is the
        number of positions that are in use, on which two variants depend."""
        if self.type == NONE:
            return torch.zeros(head_size // 2)
        rotated = self.rotated(head_size)
        frequencies = self._scaled(rotated, context)
        return torch.cat([frequencies, torch.zeros((head_size - rotated) // 2)])

    def element_order(self, head_size: int, adjacent: bool = False) -> Tensor:
        """int64 [head_size]: where a checkpoint has the elements of a head that we keep in this order, in which element
        i is rotated with i + head_size / 2. Checkpoints have those that are not rotated last, and rotate two halves of
        the others, or `adjacent` ones."""
        rotated = self.rotated(head_size)
        turned = torch.arange(rotated).unflatten(0, (-1, 2) if adjacent else (2, -1))
        turned, kept = turned.unbind(1 if adjacent else 0), torch.arange(rotated, head_size).chunk(2)
        return torch.cat([turned[0], *kept[:1], turned[1], *kept[1:]])

    def _scaled(self, size: int, context: int) -> Tensor:
        theta = self.theta
        if self.type == "dynamic" and context > self.original_max_position:
            theta *= (self.factor * context / self.original_max_position - (self.factor - 1)) ** (size / (size - 2))
        frequencies = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        if self.type == "linear":
            return frequencies / self.factor
        if self.type == "llama3":
            wavelengths = 2 * math.pi / frequencies
            turns = self.original_max_position / wavelengths
            smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            smooth = smooth.clamp(0.0, 1.0)
            return (1 - smooth) * frequencies / self.factor + smooth * frequencies
        if self.type == "yarn":
            kept = self._yarn_ramp(size)
            return kept * frequencies + (1 - kept) * frequencies / self.factor
        if self.type == "longrope":
            divisors = self.long_divisors if context > self.original_max_position else self.short_divisors
            return frequencies / torch.tensor(divisors, dtype=torch.float32)
        return frequencies

    def _yarn_ramp(self, size: int) -> Tensor:
        """float32 [size / 2]: 1 for pairs that turn often over the original context, 0 for those that hardly do
        (Peng et al., "YaRN", section 3.2)."""

        def pair_of(turns: float | None) -> float:
            assert turns is not None
            return size * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
        return 1 - ramp.clamp(0, 1)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> RopeConfig:
        """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before). Raises
        UnsupportedModelError, for both where they differ too, or KeyError (a missing field)."""
        scaling, older = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
        if scaling and any(scaling.get(TYPE if name == "type" else name) != value for name, value in older.items()):
            raise UnsupportedModelError("rope_scaling beside other rope_parameters, expected one of them")
        scaling = scaling or older
        if unknown := sorted(name for name in scaling.keys() - ROPE_FIELDS if scaling[name] is not None):
            raise UnsupportedModelError(f"RoPE parameter {unknown[0]!r}, which is not read")
        kind = scaling.get(TYPE) or scaling.get("type") or "default"
        if kind not in TYPES:
            raise UnsupportedModelError(f"RoPE type {kind!r}, expected {', '.join(TYPES)}")
        longest = raw["max_position_embeddings"]
        share = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
        original = scaling.get("original_max_position_embeddings", raw.get("original_max_position_embeddings"))
        common = cls(
            theta=scaling.get("rope_theta", raw.get("rope_theta", 10000.0)),
            type=kind,
            factor=longest / (original or longest) if scaling.get("factor") is None else scaling["factor"],
            low_freq_factor=scaling.get("low_freq_factor", 1.0),
            high_freq_factor=scaling.get("high_freq_factor", 4.0),
            original_max_position=longest if kind == "dynamic" else original or longest,
            share=None if share == 1.0 else share,
        )
        rope = replace(common, **variant_fields(common, scaling))
        rope.check()
        return rope

    def check(self) -> None:
        """Raise ValueError, which names it, for a parameter that no model has."""
        require_number("rope_theta", self.theta, 1, 1e12)
        require_number("RoPE's partial_rotary_factor", 1 if self.share is None else self.share, 0, 1)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"):
            require_number(f"RoPE's {name}", getattr(self, name), 1e-3, 1e9)
        for name in ("attention_factor", "beta_fast", "beta_slow"):
            if (value := getattr(self, name)) is not None:
                require_number(f"RoPE's {name}", value, 1e-6, 1e6)
        for divisor in (*(self.short_divisors or ()), *(self.long_divisors or ())):
            require_number("a divisor of LongRoPE", divisor, 1e-6, 1e9)

    def reach(self, longest: int) -> int:
        """Positions that it serves, of a model whose `max_position_embeddings` is `longest`: YaRN's factor often stands
        beside the original context's."""
        return max(longest, round(self.factor * self.original_max_position)) if self.type == "yarn" else longest

    @property
    def is_written(self) -> bool:
        """Whether `scaling` gives it."""
        return self.type in WRITTEN and self.share is None

    def scaling(self, key: str = TYPE) -> dict[str, Any] | None:
        """Hugging Face's `rope_scaling`, with the type under `key`; None without scaling. Raises ValueError for a type
        that is not written."""
        if not self.is_written:
            raise ValueError(f"RoPE of type {self.type!r}: expected {', '.join(WRITTEN)}, of whole heads")
        if self.type == "default":
            return None
        scaling: dict[str, Any] = {key: self.type, "factor": self.factor}
        if self.type == "llama3":
            scaling |= {
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                "original_max_position_embeddings": self.original_max_position,
            }
        return scaling


def variant_fields(rope: RopeConfig, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only YaRN or LongRoPE have, from Hugging Face's scaling parameters. Raises KeyError (a missing
    field)."""
    attention_factor = scaling.get("attention_factor")
    if rope.type == "yarn":
        if attention_factor is None:
            scales = scaling.get("mscale"), scaling.get("mscale_all_dim")
            top, bottom = (float(scale or 0) for scale in scales) if all(scales) else (1.0, 0.0)
            attention_factor = _yarn_scale(rope.factor, top) / _yarn_scale(rope.factor, bottom)
        return {
            "attention_factor": float(attention_factor),
            "beta_fast": float(scaling.get("beta_fast") or 32),
            "beta_slow": float(scaling.get("beta_slow") or 1),
            "truncate": scaling.get("truncate", True),
        }
    if rope.type == "longrope":
        if attention_factor is None:
            grown = math.log(rope.factor) / math.log(rope.original_max_position) if rope.factor > 1 else 0.0
            attention_factor = math.sqrt(1 + grown)
        return {
            "attention_factor": float(attention_factor),
            "short_divisors": tuple(float(divisor) for divisor in scaling["short_factor"]),
            "long_divisors": tuple(float(divisor) for divisor in scaling["long_factor"]),
        }
    return {}


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
