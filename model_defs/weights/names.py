"""Hugging Face's names of a checkpoint's tensors, whatever stands before them."""

from __future__ import annotations

BASE = "model."
"""Before the names of all weights but the head's; some checkpoints leave it out (OPT of 6.7B and more)."""
BEGINNINGS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""How names of the language model's weights begin within a wrapper, before transformers 4.52 and since, and without"""


def own_name(name: str) -> str:
    """A weight's name in the language model's own checkpoint."""
    for beginning, replacement in BEGINNINGS.items():
        if name.startswith(beginning):
            return replacement + name.removeprefix(beginning)
    return name


def whole_name(name: str) -> str:
    """A weight's name in a checkpoint of a language model whose names are whole."""
    name = own_name(name)
    return name if name.startswith((BASE, "lm_head.")) else BASE + name
