"""What `redraft serve MODEL` does first: fetch the model and build its bundle, each where it is missing."""

from __future__ import annotations

import os
from pathlib import Path

from redraft.bundle.backends import BACKENDS, Precision
from redraft.bundle.manifest import check_cpu
from redraft.cli.bundles import usual_precision
from redraft.cli.drafter_swap import learned_drafter, named
from redraft.cli.steps import Steps, one_process
from redraft.console.output import fail
from redraft.errors import BundleError
from redraft.home import DEFAULT_MODEL, HOME, RECORD
from redraft.learning.generations import Generation
from redraft.model_defs.weights.folder import GGUF
from redraft.operator_build import build_apart
from redraft.plugins.library import are_built
from redraft.serving.settings import DEFAULT, ServeSettings


def prepared(settings: ServeSettings) -> Path:
    """The bundle of a model, by way of the commands that make it; a drafter's GGUF file is fetched too. With --learn
    and no --drafter it drafts as the service of that folder did last, if that was of this model. Ends the process where
    one fails."""
    model_file = Path(settings.source).resolve()
    drafter = settings.drafter
    if drafter and drafter.suffix == ".gguf" and drafter.name == model_file.name and drafter.resolve() != model_file:
        fail(f"redraft serve: --drafter {drafter} has the name of the model's file: rename one of the two")
    try:
        check_cpu(BACKENDS[settings.backend])
    except BundleError as error:
        fail(f"redraft serve: {error}")
    if not are_built():
        build_apart()  # the build leaves cores to it; what goes wrong in it, the start of the service says
    with one_process() as execute:
        steps = Steps("redraft serve", execute=execute)
        model = fetched(settings.source, steps)
        usual = usual_precision(model, BACKENDS[settings.backend], Precision.bf16, split=settings.tp > 1)
        precision = settings.precision or usual
        options = {"--model": str(model), "--precision": precision, "--backend": settings.backend}
        if drafter:
            options["--drafter"] = str(fetched(str(drafter), steps) if drafter.suffix == ".gguf" else drafter)
        options |= {"--tp": str(settings.tp)} if settings.tp > 1 else {}
        if settings.learn and not settings.drafter and (learned := learned_drafter(settings.learn, model)):
            options["--drafter"] = str(learned)
        made = Generation.of(Path(options["--drafter"])) if "--drafter" in options else None
        if made:  # generations of any folder have the same names
            options = named(options)
        bundle = Path(steps.built_bundle(options)["--output"])
        if made:
            made.write(bundle)
        return bundle


def fetched(source: str, steps: Steps) -> Path:
    """The folder of a fetched model: one of these, or else where `redraft fetch` puts a source's. Fetch is left out for
    the name of a fetched model only: it says itself whether what is there is of this source. The default is fetched
    again where a former version stored it in bfloat16."""
    if (Path(source) / RECORD).is_file():
        return Path(os.path.abspath(source))
    name = DEFAULT_MODEL if source == DEFAULT else Path(source).resolve().name.removesuffix(".gguf")
    folder = HOME / "models" / name
    is_name = source == DEFAULT or (source == name and not Path(source).exists())
    there = (folder / RECORD).is_file() and (source != DEFAULT or (folder / GGUF).is_file())
    if not is_name or not there:
        steps.run("fetch", source, "--output", folder.parent, "--cache", HOME / "cache")
    return folder
