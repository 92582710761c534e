"""Programs of one command or several, which end with one line where an option or an input is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from redraft.console.output import err


class Rows(TyperCommand):
    """A command whose options with several values take them in a row: `--rows 1 8 16`. A command with an argument has
    no rows, since the word after a value may be the argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat such an option before each value of a row."""
        if any(param.param_type_name == "argument" for param in self.params):
            return super().parse_args(ctx, args)
        lists = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        words: list[str] = []
        option, values = "", 0
        for word in args:
            if word.startswith("--"):
                option, values = word if word in lists else "", 0
            elif option and (values := values + 1) > 1:
                words.append(option)
            words.append(word)
        return super().parse_args(ctx, words)


def run(program: str, command: Callable[..., None] | typer.Typer) -> NoReturn:
    """Run a command with the command line's arguments and end the process. A wrong option or a `typer.BadParameter`
    ends it with status 2 and one line, `program: what is wrong`."""
    app = command
    if not isinstance(app, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command()(command)
    try:
        status = app(prog_name=program.partition(" ")[0], standalone_mode=False)
    except TyperException as error:
        if message := error.format_message().removeprefix("Invalid value: "):
            err.print(f"{program}: {message}", markup=False)
        sys.exit(2)
    sys.exit(status or 0)
