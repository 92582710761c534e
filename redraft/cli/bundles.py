"""Which bundle `redraft build` would build, and whether it is there already.

A bundle's manifest records what it was built from: the options of `redraft build`, the content of the model's,
drafters' and other files that they name, and the code that exports and compiles. All of it is compared with what is
there now. Paths do not matter, nor when a file was written. Nothing here imports torch, so that each `redraft serve`
and each `redraft build` can ask.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from redraft.bundle.backends import BACKENDS, OPENVINO, Backend, Precision
from redraft.bundle.folder import is_bundle
from redraft.bundle.manifest import Manifest
from redraft.bundle.writer import require_replaceable
from redraft.cli.options import model_folder
from redraft.compiler.built_from import CODE, PATHS, built_from, differences, options_of, why_unusable
from redraft.console.output import err
from redraft.errors import BundleError
from redraft.home import DEFAULT_MODEL, HOME, calibration_of, drafter_of
from redraft.model_defs.weights.folder import stored_precision

OF_DRAFTS = ("--construction", "--ngram", "--no-ngram")
"""Options that say how to draft."""
NGRAMS = {"--no-drafter": "", "--ngram": ""}
"""The options of a model without a drafter."""
NAMED_DIFFERENCES = 4
"""Differences that a message names."""


def complete(options: dict[str, str]) -> dict[str, str]:
    """Options of `redraft build` with those that follow from the others: the default model, its drafter or else
    n-grams, a calibration that fp8 needs, and a folder under REDRAFT_HOME named after them."""
    model = model_folder(options.get("--model", DEFAULT_MODEL))
    backend = BACKENDS.get(options.get("--backend", ""), OPENVINO)
    precision = options.get("--precision") or usual_precision(model, backend, split=options.get("--tp", "1") != "1")
    result = {**options, "--model": str(model), "--backend": backend.name, "--precision": precision}
    for name in (result.keys() & set(PATHS)) - {"--model"}:  # the bundle tells them to commands that run elsewhere
        result[name] = str(Path(result[name]).absolute())
    if not result.keys() & {"--drafter", "--methods", "--no-drafter"}:
        if drafter := drafter_of(model):
            result["--drafter"] = str(drafter)
        elif not result.keys() & OF_DRAFTS:  # else `redraft build` asks what the drafts shall come from
            result |= NGRAMS
    if needs_calibration(result) and (calibration := calibration_of(model.name)).is_file():
        result["--calibration"] = str(calibration)
    split = "" if backend == OPENVINO else f"-{backend}"
    split += f"-tp{result['--tp']}" if result.get("--tp", "1") != "1" else ""
    folder = HOME / "engines" / f"{model.name}-{_drafting(result, model)}-{precision}{split}"
    result.setdefault("--output", str(folder))
    return result


def needs_calibration(options: dict[str, str]) -> bool:
    """Whether a build with these complete options lacks its --calibration."""
    backend = BACKENDS.get(options["--backend"], OPENVINO)
    return options["--precision"] in backend.calibrated and "--calibration" not in options


def usual_precision(
    model: Path, backend: Backend, otherwise: Precision | None = None, split: bool = False
) -> Precision:
    """The precision that a model folder's weights are quantized in, `source` or `fp8`, where the backend takes it
    without more, and ranks do not split fp8; else the one given, or the backend's."""
    with suppress(OSError, ValueError, AttributeError, TypeError):  # what is wrong with it, the build says
        stored = stored_precision(json.loads((model / "config.json").read_bytes()).get("quantization_config") or {})
        left_out = {*backend.calibrated, *([Precision.fp8] if split else [])}
        if stored in backend.precisions and stored not in left_out:
            return Precision(stored)
    return otherwise or backend.usual_precision


def _drafting(options: dict[str, str], model: Path) -> str:
    """What a bundle's drafts come from, in its default name."""
    if file := options.get("--methods"):
        return Path(file).stem
    if drafter := options.get("--drafter"):
        folder = Path(os.path.abspath(drafter))
        is_usual = folder.name == model.name or folder == drafter_of(model)
        return "redrafter" if is_usual else folder.name.removeprefix(f"{model.name}-")
    return "ngrams" if "--ngram" in options else "ar"


def as_arguments(options: dict[str, str]) -> list[str]:
    """The command line of options by name."""
    return [word for name, value in options.items() for word in ((name, value) if value else (name,))]


def why_to_build(options: dict[str, str]) -> tuple[list[str], bool]:
    """How the bundle in the folder differs from the one that complete options describe, nothing where it is that one;
    and whether it may be replaced: by newer code, or since it cannot be loaded here."""
    output = Path(options["--output"])
    if not is_bundle(output):
        return ["it is not there"], True
    try:
        manifest = Manifest.read(output)
    except BundleError as error:
        return [str(error)], False  # it may be of a newer version
    try:
        was = manifest.built_from
        if changes := differences(was, built_from(options, was.files if was else None)):
            return changes, changes == [CODE]
        return why_unusable(output, manifest), True
    except BundleError as error:
        return [str(error)], True


def needs_build(options: dict[str, str], named: bool = False) -> bool:
    """Whether there is something to build; says why a bundle that is there is built again. With `named` the folder is
    the user's choice: raises BundleError where a bundle of other settings or files is in it. Raises it for a folder of
    other files in any case."""
    changes, replaceable = why_to_build(options)
    output = options["--output"]
    require_replaceable(Path(output))
    if not changes or not is_bundle(Path(output)):
        return bool(changes)
    more = f" and {len(changes) - NAMED_DIFFERENCES} more" if len(changes) > NAMED_DIFFERENCES else ""
    why = "; ".join(changes[:NAMED_DIFFERENCES]) + more
    if named and not replaceable:
        raise BundleError(
            f"{output} is another bundle than the one asked for: {why}. Add --replace to build that one in its place, "
            f"choose another --output, or serve it as it is: redraft serve --bundle {output}"
        )
    err.print(f"{output} is built again: {why}", markup=False)
    return True


def say_built(options: dict[str, str]) -> None:
    """Say that there is nothing to build."""
    err.print(f"redraft build: {options['--output']} is up to date", markup=False)


def nothing_to_build(arguments: Sequence[str]) -> bool:
    """Whether `redraft build` with these arguments has nothing to do, and say so: known before torch is imported, which
    takes seconds. What this does not understand, the command refuses itself."""
    options = options_of(arguments)
    if options is None or "--help" in options or why_to_build(options := complete(options))[0]:
        return False
    say_built(options)
    return True
