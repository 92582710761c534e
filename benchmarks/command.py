"""What the scripts' command lines share: options of one meaning everywhere, lists of values, and one way to end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.exceptions import TyperException

from redraft.console.program import Rows

PROMPTS_FILE = Path(__file__).with_name("prompts.jsonl")
console = Console(highlight=False)

BundleFolder = Annotated[Path, typer.Option("--bundle", metavar="FOLDER", help="Engine bundle.")]
BundleFolders = Annotated[
    list[Path], typer.Option("--bundle", metavar="FOLDER", help="Engine bundles that draft, named by their folders.")
]
PlainBundle = Annotated[
    Path | None,
    typer.Option(
        "--auto-regressive",
        metavar="FOLDER",
        help="Engine bundle without a drafter, of the same precision; default: the same bundle, without drafts.",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option("--method", metavar="NAME", help="Methods of the bundle; default: `all`."),
]
ModelFolder = Annotated[
    Path, typer.Option("--model", metavar="FOLDER", help="The target: a folder made by redraft fetch.")
]
PromptsFile = Annotated[
    Path,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Prompts: JSON, text lines, CSV or Parquet; default: benchmarks/prompts.jsonl.",
        show_default=False,
    ),
]
NumPrompts = Annotated[
    int | None,
    typer.Option("--num-prompts", min=1, help="Prompts, spread evenly over the file; default: all."),
]
Concurrency = Annotated[list[int], typer.Option("--concurrency", help="Requests at a time, one run for each.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of an answer at most.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads of an engine; default: all cores.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Measurements of each kind.")]
FixedBudget = Annotated[
    list[str] | None,
    typer.Option(
        "--fixed-budget",
        metavar="NAME",
        help="Methods, or `all`, that draft as many nodes as they may, whatever pays; default: none.",
    ),
]
LlamaPython = Annotated[
    Path | None,
    typer.Option("--llama-cpp", metavar="PYTHON", help="Interpreter that has llama-cpp-python; default: none."),
]
LlamaModels = Annotated[
    list[Path],
    typer.Option("--llama-model", metavar="FILE", help="GGUF files of the target for llama.cpp; default: none."),
]
Report = Annotated[Path, typer.Option("--output", help="JSON file to write.")]


def require_llama(python: Path | None, models: Sequence[Path]) -> None:
    """Raises typer.BadParameter for one without the other, or for two files of one name."""
    if bool(models) != bool(python):
        raise typer.BadParameter("--llama-cpp and --llama-model: expected both, or none")
    if len({model.stem for model in models}) < len(models):
        raise typer.BadParameter("--llama-model: the files' names must differ")


def app_of(main: Callable[..., Any]) -> typer.Typer:
    """An app with a function as its only command."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=Rows, help=(sys.modules[main.__module__].__doc__ or "").replace("\n\n    ", "\n\n\b\n    "))(main)
    return app


def execute(main: Callable[..., Any] | typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run a script with the words of a command line, by default the process's. Returns its exit status:
    what the function returns, or 2 after one line on standard error for a wrong option or a `typer.BadParameter`."""
    app = main if isinstance(main, typer.Typer) else app_of(main)
    try:
        words = None if arguments is None else [str(word) for word in arguments]
        return int(app(words, standalone_mode=False) or 0)
    except TyperException as error:
        print(f"error: {error.format_message().removeprefix('Invalid value: ')}", file=sys.stderr)
        return 2


def run(main: Callable[..., Any] | typer.Typer) -> NoReturn:
    """Run a script as the process."""
    sys.exit(execute(main))
