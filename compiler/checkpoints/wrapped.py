"""Language models within checkpoints that take images too: Gemma 3 of 4B and more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model_defs.files import read_json

WRAPPER = "gemma3"
"""The wrapper's `model_type`"""
BEGINNINGS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""How names of the language model's weights begin within a wrapper, before transformers 4.52 and since, and without"""
OUTSIDE = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
"""What a wrapper's configuration says of the language model beside `text_config`"""


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`; of a wrapper, what it says of the language model, with transformers' values for what it
    leaves out. Raises as `read_json` does."""
    raw = read_json(folder / "config.json")
    if raw.get("model_type") != WRAPPER:
        return raw
    from transformers import Gemma3TextConfig

    text = Gemma3TextConfig(**raw.get("text_config") or {}).to_dict()
    said = {name: raw[name] for name in OUTSIDE if raw.get(name) is not None}
    return text | said | {"architectures": ["Gemma3ForCausalLM"]}


def own_name(name: str) -> str:
    """A weight's name in the language model's own checkpoint."""
    for beginning, own in BEGINNINGS.items():
        if name.startswith(beginning):
            return own + name.removeprefix(beginning)
    return name
