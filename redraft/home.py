"""Where models, drafters, bundles and downloads are kept, and what comes with the package."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

HOME_VARIABLE = "REDRAFT_HOME"
PACKAGE = Path(__file__).resolve().parent
SITE = PACKAGE.parent
"""The folder from which `redraft` is imported: a clone, or the site-packages that a wheel is installed in."""
CLONE = SITE if (SITE / "Makefile").is_file() else None
"""The clone of the repository that this package runs from; None for an installed one."""
SHIPPED = CLONE or PACKAGE
"""The folder whose `drafters` and `benchmarks` came with the package."""
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""What commands take where no model is named."""
RECORD = "source.json"
"""What `redraft fetch` writes into a model's folder: where the model is from, and which drafter of the package is for
its weights"""
PROMPTS = SHIPPED / "benchmarks" / "prompts.jsonl"
"""Prompts to measure on where a user has none."""


def _home() -> Path:
    """`REDRAFT_HOME`; without it a clone's `artifacts`, or else the user's cache folder."""
    if folder := os.environ.get(HOME_VARIABLE):
        return Path(folder).expanduser()
    if CLONE:
        return CLONE / "artifacts"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "redraft"


HOME = _home()


def drafter_of(model: Path) -> Path | None:
    """The drafter of a model's folder: the user's own before the one that came with the package, as `redraft fetch`
    noted; earlier versions did not, and had one for the default model only. None without one."""
    name = DEFAULT_MODEL if model.name == DEFAULT_MODEL else ""
    with suppress(OSError, ValueError, AttributeError):  # not a fetched one
        name = str(json.loads((model / RECORD).read_bytes()).get("drafter", name))
    folders = (own_drafter(model.name), SHIPPED / "drafters" / name)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def own_drafter(model: str, kind: str = "recurrent") -> Path:
    """Where a model's drafter of a kind is trained."""
    return HOME / "drafters" / (model if kind == "recurrent" else f"{model}-{kind}")


def data_of(model: str, layers: str | None = None) -> Path:
    """Where a model's teacher data are kept, apart those with what enters some of its layers."""
    return HOME / "data" / (f"{model}-layers" if layers else model)


def calibration_of(model: str) -> Path:
    """Where a model's calibration for fp8 is kept."""
    return HOME / "calibration" / f"{model}.json"
