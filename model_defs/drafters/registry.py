"""The registry of draft models. A new one is a module of its own and an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from redraft.model_defs.drafters.base import Drafter, is_same
from redraft.model_defs.drafters.block import BlockDrafter
from redraft.model_defs.drafters.draft_lm import DraftLM
from redraft.model_defs.drafters.eagle import EagleDrafter
from redraft.model_defs.drafters.eagle3 import Eagle3Drafter, ParallelEagle3Drafter
from redraft.model_defs.drafters.hidden_state import HiddenStateDrafter
from redraft.model_defs.drafters.hub.eagle import OWN_HEAD, WITHOUT_HEAD
from redraft.model_defs.drafters.hub.readers import read, require_reader
from redraft.model_defs.drafters.medusa import MedusaDrafter
from redraft.model_defs.drafters.recurrent import RecurrentDrafter
from redraft.model_defs.files import read_json
from redraft.model_defs.target.model import Target

DRAFTERS: dict[str, type[Drafter]] = {
    kind.name: kind
    for kind in (
        RecurrentDrafter,
        HiddenStateDrafter,
        EagleDrafter,
        Eagle3Drafter,
        ParallelEagle3Drafter,
        BlockDrafter,
        MedusaDrafter,
        DraftLM,
    )
}

RECURRENT = RecurrentDrafter.name


def kind_of(folder: Path) -> str:
    """The kind of a trained drafter's folder, ours or the hub's. Raises ValueError or FileNotFoundError."""
    return read_json(folder / "config.json").get("drafter") or require_reader(folder)[1].kind


def hub_form(folder: Path) -> str | None:
    """The name of the form of a folder from the hub, None for our own."""
    return None if "drafter" in read_json(folder / "config.json") else require_reader(folder)[1].form


def load_drafter(folder: Path, target: Target, answers: Mapping[str, str] | None = None) -> Drafter:
    """The drafter of a folder written by redraft train, or of one from the hub; `answers` to what the latter
    leaves open.

    Raises ValueError for a kind that is not known, or a drafter that does not fit the target or is not whole, or
    FileNotFoundError."""
    kind = read_json(folder / "config.json").get("drafter")
    if kind is None:
        return load_hub_drafter(folder, target, answers or {})
    if kind not in DRAFTERS:
        raise ValueError(f"{folder}/config.json: unknown drafter {kind!r}; known are {', '.join(DRAFTERS)}")
    if answers:
        raise ValueError(f"--read-as: {folder} was written by redraft train, which leaves nothing open")
    return DRAFTERS[kind].load(folder, target)


def load_hub_drafter(folder: Path, target: Target, answers: Mapping[str, str]) -> Drafter:
    """The drafter of a folder from the hub. Raises as `load_drafter`."""
    reader, hub_folder = read(folder, target.config, answers)
    kind, embedding = DRAFTERS[reader.kind], hub_folder.embedding
    if hub_folder.mask_embedding is not None and hub_folder.config.mask_token < target.config.vocab_size:
        embedding = (target.embedding.weight if embedding is None else embedding).detach().clone()
        embedding[hub_folder.config.mask_token] = hub_folder.mask_embedding
    try:
        drafter = kind.of_weights(hub_folder.config, target, hub_folder.weights, hub_folder.hot_ids, embedding)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    if hub_folder.head is not None and not is_same(hub_folder.head, target.lm_head.weight):
        raise ValueError(
            f"{folder}: lm_head.weight is not the target's head; {WITHOUT_HEAD}, or --read-as {OWN_HEAD}=true to draft "
            "with this one, as vLLM does"
        )
    return drafter
