"""The readers there are. A new one is a module of its own and an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from redraft.model_defs.drafters.hub.block import DFLASH, DSPARK
from redraft.model_defs.drafters.hub.eagle import EAGLE
from redraft.model_defs.drafters.hub.eagle3 import EAGLE3_MODELOPT, EAGLE3_OFFICIAL, EAGLE3_SPECULATORS, P_EAGLE
from redraft.model_defs.drafters.hub.folder import HubFolder, Reader, Reading
from redraft.model_defs.drafters.hub.medusa import MEDUSA
from redraft.model_defs.drafters.hub.neutral import require_all_read
from redraft.model_defs.drafters.hub.redrafter import REDRAFTER, is_trtllm
from redraft.model_defs.drafters.hub.unserved import unserved_form
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.errors import UnsupportedModelError

READERS: tuple[Reader, ...] = (
    *(REDRAFTER, MEDUSA, DFLASH, DSPARK, P_EAGLE, EAGLE3_SPECULATORS, EAGLE3_OFFICIAL, EAGLE3_MODELOPT, EAGLE),
)
IGNORE = "ignore"
"""What --read-as names fields and files with, + between them, that a reader is to take as absent"""
SHOWN = 4
"""Tensors that a message names."""


def reader_of(folder: HubFolder) -> Reader | None:
    """What reads a folder, None where it is of no known form. Raises ValueError for a form that is converted first, or
    not served yet."""
    if is_trtllm(folder):
        raise ValueError(
            f"{folder.path} is a checkpoint of TensorRT-LLM's ReDrafter, with the target and its drafter in one. "
            f"`redraft export from-trtllm {folder.path} --output FOLDER` (with --model where it came without the "
            "target's tokenizer) makes FOLDER/target for MODEL and FOLDER/drafter for DRAFTER of it"
        )
    if form := unserved_form(folder):
        forms = ", ".join(reader.form for reader in READERS)
        raise ValueError(f"{folder.path} holds a drafter that is recognised: {form}; not served yet. Read are {forms}")
    return next((reader for reader in READERS if reader.holds(folder)), None)


def require_reader(path: Path) -> tuple[HubFolder, Reader]:
    """A folder and what reads it. Raises ValueError that says what an unknown one holds and which forms are read."""
    folder = HubFolder(path)
    if reader := reader_of(folder):
        return folder, reader
    names = sorted(folder.names)
    holds = f"tensors {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}" if names else "no weights"
    named = {name: folder.config[name] for name in ("model_type", "architectures") if name in folder.config}
    says = ", ".join(f"{name} {value!r}" for name, value in named.items()) or f"keys {sorted(folder.config)[:SHOWN]}"
    forms = ", ".join(reader.form for reader in READERS)
    raise ValueError(
        f"{path} holds no drafter that is read: config.json has {says}; {holds}. Read are drafters of "
        f"`redraft train` and, of the hub, {forms}"
    )


def made_for(path: Path) -> str | None:
    """The target that a folder's `config.json` names, None where it names none."""
    folder = HubFolder(path)
    verifier = folder.config.part("speculators_config").part("verifier")
    return verifier.get("name_or_path") or folder.says("base_model_name_or_path")


def parse_answers(text: str | None) -> dict[str, str]:
    """The answers of --read-as, name=value with commas between them. Raises ValueError."""
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    if not all(name and value for name, _, value in pairs):
        raise ValueError(f"--read-as {text}: expected name=value, with commas between several")
    return {name.strip(): value.strip() for name, _, value in pairs}


def read(path: Path, target: TargetConfig, answers: Mapping[str, str]) -> tuple[Reader, Reading]:
    """A folder's drafter for a target. Raises as `require_reader` and `Reader.read`, and ValueError for an answer to
    what the form does not leave open, and for fields and files that no reader knows."""
    folder, reader = require_reader(path)
    answers = dict(answers)
    ignored = ignored_names(folder, answers.pop(IGNORE, ""))
    if unknown := sorted(set(answers) - set(reader.questions)):
        asked = f"only {', '.join(reader.questions)}" if reader.questions else "nothing"
        raise ValueError(f"--read-as {unknown[0]}={answers[unknown[0]]}: {reader.form} leaves {asked} open")
    folder.config = folder.config.fresh(ignored)
    folder.config.check_types()
    try:
        reading = reader.read(folder, target, answers)
    except UnsupportedModelError as refusal:
        raise ValueError(f"{path}: {refusal.found}") from None
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except (KeyError, TypeError, IndexError, RuntimeError, ArithmeticError) as error:
        what = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{path}: what it holds is not of the form {reader.form}: {what[0]}") from error
    require_all_read(folder, reader.form, ignored)
    return reader, reading


def ignored_names(folder: HubFolder, text: str) -> set[str]:
    """The fields and files that --read-as ignore= names. Raises ValueError for one that is not there."""
    names = {name for name in text.split("+") if name}
    if absent := sorted(name for name in names - folder.config.names() if not (folder.path / name).is_file()):
        raise ValueError(
            f"--read-as {IGNORE}={absent[0]}: {folder.path} has no such field in config.json, nor such a file"
        )
    return names
