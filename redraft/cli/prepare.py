"""What `redraft serve MODEL` does first: fetch the model, build its bundle and tune it, each where it is missing."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import typer

from redraft.bundle import budget
from redraft.bundle.manifest import MANIFEST
from redraft.cli.bundles import as_arguments, complete, needs_build
from redraft.console.output import err, fail
from redraft.home import DEFAULT_MODEL, HOME, calibration_of
from redraft.serving.processes import ServingError
from redraft.serving.ranks import launch_command
from redraft.serving.settings import DEFAULT, ServeSettings

RECORD = "source.json"
"""What a fetched model's folder has."""


def prepared(settings: ServeSettings) -> Path:
    """The tuned bundle of a model, by way of the commands that make it; `settings.source` may be a bundle already.

    Each step is a command of its own, which is printed, and can be killed and run again. Ends the process where one
    fails.
    """
    source, backend, precision, tp = settings.source, settings.backend, settings.precision, settings.tp
    if (Path(source) / MANIFEST).is_file():
        return Path(source)
    model = _model(source)
    options = {"--model": str(model), "--precision": precision, "--backend": backend}
    options |= {"--drafter": str(settings.drafter)} if settings.drafter else {}
    options |= {"--tp": str(tp)} if tp > 1 else {}
    if precision == "fp8" and not calibration_of(model.name).is_file():
        _run("calibrate", "--model", model)
    options = complete(options)
    if needs_build(options):
        _run("build", *as_arguments(options))
    bundle = Path(options["--output"])
    if settings.tune_minutes and budget.main(bundle):
        _run("tune", "--bundle", bundle, "--minutes", settings.tune_minutes, ranks=tp)
    return bundle


def _model(source: str) -> Path:
    """The folder of a fetched model: one of these, or else where `redraft fetch` puts a source's."""
    if (Path(source) / RECORD).is_file():
        return Path(source)
    name = DEFAULT_MODEL if source == DEFAULT else Path(source).resolve().name.removesuffix(".gguf")
    folder = HOME / "models" / name
    if source != DEFAULT or not (folder / RECORD).is_file():
        _run("fetch", source, "--output", folder.parent, "--cache", HOME / "cache")
    return folder


def _run(command: str, *arguments: object, ranks: int = 1) -> None:
    words = [command, *map(str, arguments)]
    err.print(shlex.join(["redraft", *words]), markup=False)
    try:
        status = subprocess.call(launch_command([sys.executable, "-m", "redraft.cli", *words], ranks))
    except ServingError as error:  # MPI is missing
        fail(f"redraft serve: {error}")
    if status in (130, -signal.SIGINT):
        raise typer.Exit(130)
    if status:
        fail(f"redraft serve: `redraft {command}` ended with status {status}; the same command goes on from there")
