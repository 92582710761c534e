"""A whole model as draft LM: which folders hold one, and whether it knows the target's tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from redraft.errors import BundleError
from redraft.model_defs.drafters.draft_lm import DraftLM
from redraft.model_defs.drafters.hub.folder import HubFolder
from redraft.model_defs.drafters.hub.readers import reader_of
from redraft.model_defs.files import read_tensors
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.folder import gguf_file


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model rather than a trained drafter, ours or the hub's. Raises ValueError for a drafter
    that is not served, FileNotFoundError without a `config.json` or where weights are missing."""
    hub_folder = HubFolder(folder)
    if gguf_file(folder):
        return "model_type" in hub_folder.config
    if "drafter" in hub_folder.config or reader_of(hub_folder) is not None:
        return False
    return "model_type" in hub_folder.config and any("embed_tokens" in name for name in hub_folder.names)


def load_draft_model(folder: Path, target: Target, model: Path, hot_vocabulary: Path | None) -> DraftLM:
    """The model of a folder as draft LM for the target of the folder `model`, its head restricted to the hot vocabulary
    of a trained drafter. Raises BundleError, ValueError or FileNotFoundError where it does not fit or is not whole."""
    check_same_tokens(model, folder)
    hot_ids = read_tensors(hot_vocabulary / "drafter.safetensors").get("hot_ids") if hot_vocabulary else None
    if hot_vocabulary and hot_ids is None:
        raise BundleError(f"--hot-vocabulary {hot_vocabulary}: this drafter knows all tokens")
    try:
        return DraftLM.of_model(Target.from_folder(folder), target, hot_ids)
    except (UnsupportedModelError, ValueError) as error:
        raise BundleError(f"{folder}: {error}") from None


def check_same_tokens(model: Path, folder: Path) -> None:
    """Raises BundleError, which says how they differ, unless both tokenizers give every token the same id."""
    theirs, ours = read_vocabulary(model), read_vocabulary(folder)
    if theirs == ours:
        return
    moved = [token for token in theirs.keys() & ours.keys() if theirs[token] != ours[token]]
    parts = [
        f"{len(tokens)} {what}, such as {min(tokens)!r}"
        for tokens, what in (
            (moved, "tokens have other ids"),
            (theirs.keys() - ours.keys(), "tokens only the target has"),
            (ours.keys() - theirs.keys(), "tokens only the draft LM has"),
        )
        if tokens
    ]
    raise BundleError(f"{folder} has another tokenizer than {model}, a draft LM needs the same: {'; '.join(parts)}")


def read_vocabulary(folder: Path) -> dict[str, int]:
    """The ids of a tokenizer's tokens. Raises BundleError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise BundleError(f"{folder} has no tokenizer.json")
    try:
        return Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # tokenizers raises nothing more particular
        raise BundleError(f"{file}: {error}") from None
