"""Other drafters of a bundle: those that a folder has learned, and the bundle that is served with another drafter."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from redraft.bundle.manifest import Manifest
from redraft.bundle.method import MethodFields
from redraft.bundle.writer import share_files
from redraft.cli.options import model_folder
from redraft.cli.steps import Execute, Steps
from redraft.compiler.built_from import PATHS, files_of_option, input_file, options_of
from redraft.console.output import fail
from redraft.errors import BundleError
from redraft.home import HOME
from redraft.learning.generations import Generation, served_generation
from redraft.model_defs.weights.folder import model_digest

OF_ITS_DRAFTER = ("--drafter", "--no-drafter", "--read-as", "--hot-vocabulary", "--bigrams", "--target-layers")
"""Options of the bundle that is served which are not for another drafter."""
DIGEST_DIGITS = 8


def learned_drafter(learned: Path, model: Path) -> Path | None:
    """The generation that a service of the folder `learned` was last swapped to, if it is the model's."""
    folder = served_generation(learned)
    made = Generation.of(folder) if folder else None
    with suppress(OSError, ValueError):  # what is wrong with the model is said where it is read
        return folder if made and made.model == model_digest(model) else None
    return None


def with_drafter(served: Path, drafter: Path, program: str, execute: Execute | None = None) -> Path:
    """The bundle that differs from the one `served` in its drafter only, built where it is missing, under
    REDRAFT_HOME/engines, by `execute` as `Steps` takes it. Ends the process where it cannot be built."""
    try:
        manifest = Manifest.read(served)
        options = options_with(manifest.command, drafter)
        bundle = Path(Steps(program, execute=execute).built_bundle(options)["--output"])
        if Manifest.read(bundle).target_fingerprint != manifest.target_fingerprint:
            raise BundleError(
                f"{options['--model']} is no longer the model that {served} was built of: serve it anew with "
                f"redraft serve {options['--model']} --drafter {drafter}"
            )
        share_files(bundle, served)
        if generation := Generation.of(drafter):
            generation.write(bundle)
    except (BundleError, OSError) as error:
        fail(f"{program}: {error}")
    return bundle


def options_with(command: str, drafter: Path) -> dict[str, str]:
    """The options of `redraft build` for the bundle that `command` built, with another drafter.

    Raises BundleError where that cannot be told, or where the model or the drafter is not there.
    """
    options = options_of(shlex.split(command)[2:]) or {}
    if "--methods" in options or "--model" not in options:
        why = "has several methods" if "--methods" in options else "does not say what it was built of"
        raise BundleError(f"the bundle that is served {why}: build another one, and give it as --bundle")
    if not (drafter / "config.json").is_file():
        raise BundleError(f"--drafter {drafter} is not a drafter: it has no config.json")
    if not (model := model_folder(options["--model"])).is_dir():
        raise BundleError(f"the model {model} of the bundle that is served is gone: redraft fetch fetches it again")
    left_out = {*OF_ITS_DRAFTER, "--output", "--replace"}
    if "--drafter" not in options:
        left_out |= {f"--{'no-' * no}{name.replace('_', '-')}" for name in MethodFields.model_fields for no in (0, 1)}
    kept = {name: value for name, value in options.items() if name not in left_out}
    return named({**kept, "--model": str(model), "--drafter": str(drafter)})


def named(options: dict[str, str]) -> dict[str, str]:
    """Options of `redraft build` for a model and a drafter, with a folder that bundles of another drafter or of other
    options never have, whatever the drafter's folder is called."""
    model, drafter = Path(options["--model"]), Path(options["--drafter"])
    precision = f"-{options['--precision']}" if "--precision" in options else ""
    output = HOME / "engines" / f"{model.name}{precision}-{content_digest(drafter, options)}"
    return {**options, "--output": str(output), "--replace": ""}


def content_digest(drafter: Path, options: Mapping[str, str]) -> str:
    """DIGEST_DIGITS of what a drafter's folder holds, and of the options that name no file."""
    digest = hashlib.sha256()
    for name, value in sorted(options.items()):
        if name not in PATHS:
            digest.update(f"{name} {value}\n".encode())
    for name, file in files_of_option("--drafter", drafter):
        with suppress(FileNotFoundError):
            digest.update(f"{name} {input_file(file).sha256}\n".encode())
    return digest.hexdigest()[:DIGEST_DIGITS]
