"""A family of target models, and the checks that families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model_defs.target.errors import UnsupportedModelError

HFConfig = dict[str, Any]
"""A Hugging Face `config.json`."""


@dataclass(frozen=True)
class Family:
    """Models of one Hugging Face architecture, all of which the target's layers compute."""

    model_type: str
    """The architecture's name in `config.json`."""
    title: str
    """Its models in words, for messages."""
    own_fields: Callable[[HFConfig], dict[str, Any]]
    """The fields of `TargetConfig` that the family reads in its own way, by name. Raises UnsupportedModelError
    for a feature that the layers do not compute."""


def refuse_biases(raw: HFConfig) -> None:
    """Raise UnsupportedModelError for biases beside those that a family always has."""
    for flag in ("attention_bias", "mlp_bias"):
        if raw.get(flag):
            raise UnsupportedModelError(f"{flag} true, expected false")


def refuse_sliding_window(raw: HFConfig) -> None:
    """Raise UnsupportedModelError for a window that is smaller than the context."""
    window, context = raw.get("sliding_window"), raw["max_position_embeddings"]
    if window is not None and window < context:
        raise UnsupportedModelError(
            f"an active sliding window of {window} tokens, expected full attention to all {context}"
        )
