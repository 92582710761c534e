"""The registry of draft models. A new one is a module of its own and an entry here."""

from __future__ import annotations

from pathlib import Path

from model_defs.drafters.base import Drafter
from model_defs.drafters.draft_lm import DraftLM
from model_defs.drafters.eagle import EagleDrafter
from model_defs.drafters.hidden_state import HiddenStateDrafter
from model_defs.drafters.medusa import MedusaDrafter
from model_defs.drafters.recurrent import RecurrentDrafter
from model_defs.files import read_json
from model_defs.target.model import Target

DRAFTERS: dict[str, type[Drafter]] = {
    kind.name: kind for kind in (RecurrentDrafter, HiddenStateDrafter, EagleDrafter, MedusaDrafter, DraftLM)
}

RECURRENT = RecurrentDrafter.name
"""The kind of a folder that names none: Apple's checkpoints."""


def load_drafter(folder: Path, target: Target) -> Drafter:
    """The drafter of a folder written by build/train_drafter.py, or Apple's ReDrafter checkpoint.

    Raises ValueError for a kind that is not known or a drafter that does not fit the target, FileNotFoundError,
    KeyError (a missing field or weight) or RuntimeError (weights of another shape)."""
    kind = read_json(folder / "config.json").get("drafter", RECURRENT)
    if kind not in DRAFTERS:
        raise ValueError(f"{folder}/config.json: unknown drafter {kind!r}; known are {', '.join(DRAFTERS)}")
    return DRAFTERS[kind].load(folder, target)
