"""The `redraft` command. A command's module is imported when it runs: torch alone takes seconds."""

from __future__ import annotations

import ast
import atexit
import gc
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Literal, NoReturn

import typer

from redraft.console.interrupt import interruptible
from redraft.console.output import err, out
from redraft.console.program import Rows, run
from redraft.errors import install


@dataclass(frozen=True)
class Command:
    """A command: `module:function` or `module:app` in this package, and its group of `--help`."""

    target: str
    group: str
    extra: str = "serve"
    """The extra of the package that it needs"""
    done: str = ""
    """`module:function` that says, of the command's arguments, whether there is nothing to do: it is asked before the
    module of the command is imported, which takes seconds."""

    def is_done(self, arguments: list[str]) -> bool:
        """Whether these arguments leave nothing to do."""
        return bool(self.done) and resolve_name(f"{__name__}.{self.done}")(arguments)

    def load(self) -> Callable[..., None] | typer.Typer:
        """Its function, or the app of its subcommands. Raises ModuleNotFoundError where a package is missing."""
        return resolve_name(f"{__name__}.{self.target}")

    def summary(self) -> str:
        """The first sentence of its docstring, read without importing it."""
        module, _, name = self.target.partition(":")
        tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        text = ast.get_docstring(functions.get(name, tree)) or ""
        return re.split(r"(?<=\.)\s", text.replace("\n", " "), maxsplit=1)[0]


MODELS, DRAFTERS, SERVICE = "Models", "Drafters", "Service"
COMMANDS = {
    "fetch": Command("fetch:main", MODELS, "build"),
    "build": Command("build:main", MODELS, "build", done="bundles:nothing_to_build"),
    "tune": Command("tune:main", MODELS, "build"),
    "inspect": Command("inspect:main", MODELS, "build"),
    "export": Command("export:app", MODELS, "build"),
    "distill": Command("distill:main", DRAFTERS, "build"),
    "train": Command("train:main", DRAFTERS, "train"),
    "drafter": Command("drafter:main", DRAFTERS, "build"),
    "learn": Command("learn:main", DRAFTERS, "learn"),
    "calibrate": Command("calibrate:main", DRAFTERS, "build"),
    "serve": Command("service:serve", SERVICE),
    "swap": Command("service:swap", SERVICE),
    "stop": Command("service:stop", SERVICE),
    "status": Command("service:status", SERVICE),
    "generate": Command("service:generate", SERVICE),
    "chat": Command("chat:main", SERVICE),
    "loadtest": Command("loadtest:main", SERVICE, "loadtest"),
    "doctor": Command("doctor:main", SERVICE),
}


def application(*loaded: str) -> typer.Typer:
    """The command line with these commands, ready to run; by default with all, which stand in `--help` only."""
    # The groups of commands need rich. It cuts the names of long options in a narrow terminal.
    markup: Literal["rich"] | None = None if loaded else "rich"
    app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=markup)
    app.callback()(top_level)
    for name in loaded or COMMANDS:
        command = COMMANDS[name]
        target = command.load() if loaded else _unloaded
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name, short_help=command.summary(), rich_help_panel=command.group)
        else:
            app.command(name, cls=Rows, short_help=command.summary(), rich_help_panel=command.group)(target)
    return app


def main(*arguments: str) -> NoReturn:
    """Run the command line, by default with the process's arguments, and end the process."""
    atexit.register(gc.freeze)  # at its end Python looks for cycles, for seconds in what torch's exporter leaves
    if arguments:
        sys.argv = ["redraft", *arguments]
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        run(f"redraft {name}".rstrip() if not name.startswith("-") else "redraft", application())
    if COMMANDS[name].is_done(sys.argv[2:]):
        sys.exit(0)
    try:
        with interruptible(f"redraft {name}", "before it began"):  # the import takes seconds
            app = application(name)
        run(f"redraft {name}", app)
    except ModuleNotFoundError as error:  # on import, or what is only imported while a command runs
        package = error.name or ""
        if package.partition(".")[0] == "redraft":  # a fault of this package, which no extra mends
            raise
        err.print(f"redraft {name} needs the package {package}: {install(COMMANDS[name].extra)}", markup=False)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"redraft {metadata.version('redraft')}")
        raise typer.Exit


def top_level(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding: targets and drafters to engines, served under Triton and OpenAI's API."""


def _unloaded() -> None:
    """Stand for a command in `--help`. It is only run where the command is not the first word, as after `--`."""
    raise typer.BadParameter("expected a command as the first word, such as `redraft stop`")
