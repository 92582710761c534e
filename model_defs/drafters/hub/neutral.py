"""Fields that change what a drafter computes in some reader, and that no reader here takes: only values that change
nothing are read."""

from __future__ import annotations

from typing import Any

from model_defs.drafters.hub.folder import HubFolder

NEUTRAL: dict[str, Any] = {
    "input_embedding_scale": 1,
    "output_multiplier": 1,
    "logit_scale": 1,
    "final_logit_softcapping": 0,
    "attn_logit_softcapping": 0,
    "attention_sink_bias": False,
    "attention_value_scale": 1,
}
"""The values that change nothing, as null does"""
PARTS = ("dflash_config", "eagle_config", "transformer_layer_config")
"""Objects within `config.json` that may hold such fields too"""


def require_neutral(folder: HubFolder) -> None:
    """Raise ValueError for a field of NEUTRAL that has another value."""
    parts = (folder.config, *(folder.config.get(name) for name in PARTS))
    for part in (part for part in parts if isinstance(part, dict)):
        for name, read in NEUTRAL.items():
            if (value := part.get(name)) not in (None, read):
                raise ValueError(f"{folder.path}: config.json says {name} {value!r}; read is {read!r}")
