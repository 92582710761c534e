"""Commands in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import typer
from click.testing import Result
from typer.testing import CliRunner

from redraft.cli import application


def invoke(main: Callable[..., None], *arguments: object) -> Result:
    """What a command's function does with these arguments."""
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_command(arguments: Sequence[str], env: Mapping[str, str] | None = None) -> Result:
    """What `redraft` does with these arguments."""
    return CliRunner().invoke(application(arguments[0]), list(arguments), env=env)
