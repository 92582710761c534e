"""Build scripts as the commands that they are."""

from __future__ import annotations

from collections.abc import Callable

import typer
from click.testing import Result
from typer.testing import CliRunner


def invoke(main: Callable[..., None], *arguments: object) -> Result:
    """What a script's `main` does with these arguments."""
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
