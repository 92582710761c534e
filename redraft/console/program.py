"""Programs of one command or several, which end with one line where an option or an input is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

import typer
from typer.exceptions import TyperException

from redraft.console.output import err


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
