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
from redraft.cli.ensure import is_built
from redraft.console.output import err, fail
from redraft.home import HOME, drafter_of

RECORD = "source.json"
"""What a fetched model's folder has."""
DEFAULT, DEFAULT_NAME = "default", "SmolLM2-135M-Instruct"


def prepared(source: str, drafter: Path | None, backend: str, precision: str, tp: int, minutes: float) -> Path:
    """The tuned bundle of a model, by way of the commands that make it; `source` may be a bundle already.

    Each step is a command of its own, which is printed, and can be killed and run again. Ends the process where one
    fails.
    """
    if (Path(source) / MANIFEST).is_file():
        return Path(source)
    model = _model(source)
    drafter = drafter or drafter_of(model.name)
    split = "" if backend == "openvino" else f"-{backend}"
    split += "" if tp == 1 else f"-tp{tp}"
    bundle = HOME / "engines" / f"{model.name}-{'redrafter' if drafter else 'ngrams'}-{precision}{split}"
    drafting = (
        ["--drafter", drafter, "--beam-width", 4] if drafter else ["--no-drafter", "--construction", "ngram_trie"]
    )
    options = ["--backend", backend, "--model", model, "--precision", precision, *(["--tp", tp] if tp > 1 else [])]
    arguments = [str(argument) for argument in (*options, *drafting, "--output", bundle)]
    if not is_built(arguments, named=False):
        _run("build", *arguments)
    if minutes and budget.main(bundle):
        ranks = ["mpiexec", "-n", str(tp)] if tp > 1 else []
        _run("tune", "--bundle", bundle, "--minutes", minutes, launcher=ranks)
    return bundle


def _model(source: str) -> Path:
    """The folder of a fetched model: one of these, or else where `redraft fetch` puts a source's."""
    if (Path(source) / RECORD).is_file():
        return Path(source)
    name = DEFAULT_NAME if source == DEFAULT else Path(source).resolve().name.removesuffix(".gguf")
    folder = HOME / "models" / name
    if source != DEFAULT or not (folder / RECORD).is_file():
        _run("fetch", source, "--output", folder.parent, "--cache", HOME / "cache")
    return folder


def _run(command: str, *arguments: object, launcher: list[str] | None = None) -> None:
    shown = ["redraft", command, *map(str, arguments)]
    err.print(shlex.join([*(launcher or []), *shown]), markup=False)
    status = subprocess.call([*(launcher or []), sys.executable, "-m", "redraft.cli", *shown[1:]])
    if status in (130, -signal.SIGINT):
        raise typer.Exit(130)
    if status:
        fail(f"redraft serve: `redraft {command}` ended with status {status}; the same command goes on from there")
