"""Rotary position embedding: its constants, and the scaling variants in use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_defs.target.errors import UnsupportedModelError

TYPES = ("default", "linear", "llama3")


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

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> RopeConfig:
        """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before). Raises
        UnsupportedModelError, or KeyError (a missing field)."""
        scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in TYPES:
            raise UnsupportedModelError(f"RoPE type {kind!r}, expected {', '.join(TYPES)}")
        if (factor := scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
            raise UnsupportedModelError(f"partial_rotary_factor {factor}, expected 1.0")
        return cls(
            theta=scaling.get("rope_theta", raw.get("rope_theta", 10000.0)),
            type=kind,
            factor=scaling.get("factor", 1.0),
            low_freq_factor=scaling.get("low_freq_factor", 1.0),
            high_freq_factor=scaling.get("high_freq_factor", 4.0),
            original_max_position=scaling.get("original_max_position_embeddings", raw["max_position_embeddings"]),
        )
