"""Options that several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from redraft.bundle.backends import BACKENDS, Backend, backend_of
from redraft.errors import why_no_folder
from redraft.home import DEFAULT_MODEL, HOME

BACKEND_NAMES = f"[{'|'.join(BACKENDS)}]"


def backend_named(name: object) -> Backend:
    """The value of --backend."""
    try:
        return backend_of(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def model_folder(name: str) -> Path:
    """The folder of a model that redraft fetch made: a path, or its name under REDRAFT_HOME.

    It is absolute: bundles and drafters are named after it, and `.` is no name.
    """
    folder = HOME / "models" / name
    return folder if folder.is_dir() and not Path(name).is_dir() else Path(os.path.abspath(name))


def fetched_model(name: object) -> Path:
    """The value of --model."""
    folder = model_folder(str(name))
    if not folder.is_dir():
        source = "default" if name == DEFAULT_MODEL else name
        raise typer.BadParameter(f"no model at {name}: `redraft fetch {source}` fetches one")
    return folder


def check_folder(path: Path, option: str) -> None:
    """Raise BadParameter unless the folder that an option names is there or can be made."""
    if fault := why_no_folder(path):
        raise typer.BadParameter(f"{option} {path}: {fault}")


ModelOption = Annotated[
    Path,
    typer.Option(
        "--model",
        parser=fetched_model,
        metavar="FOLDER",
        help="The target: a folder made by redraft fetch, or its name under REDRAFT_HOME/models.",
    ),
]
FetchedModelOption = Annotated[
    Path, typer.Option("--model", metavar="FOLDER", help="The target: a folder made by redraft fetch.")
]
BundleOption = Annotated[Path, typer.Option("--bundle", metavar="FOLDER", help="Engine bundle.")]
TemperatureOption = Annotated[float | None, typer.Option(help="Sampling temperature; default: greedy decoding.")]
TopPOption = Annotated[
    float | None,
    typer.Option(help="Probability that the sampled tokens add up to, with --temperature; default: 1, all."),
]
SeedOption = Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Seed of sampling; default: a drawn one.")]
MethodOption = Annotated[
    str | None,
    typer.Option("--method", metavar="NAME", help="A method of the bundle, or auto_regressive; default: its first."),
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; default: one for each core.")]
OwnPromptsOption = Annotated[
    Path,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Prompts of the kind that will be served: JSON, plain text lines, CSV or Parquet; default: some that come "
        "with redraft.",
        show_default=False,
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="JSON lines or arrays (`prompt`, `turns`, `messages`, `conversations`; also `source`, `response`), plain "
        "text lines, CSV or Parquet. Default: the target writes all prompts itself.",
        show_default=False,
    ),
]
ColumnOption = Annotated[
    str | None,
    typer.Option(
        "--column",
        metavar="NAME",
        help="Field or column of --prompts that holds them; default: a usual one, such as `prompt`.",
    ),
]
