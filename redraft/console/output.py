"""Where the commands write: answers to standard output, all else to standard error."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with a message."""
    err.print(message, markup=False)
    raise typer.Exit(code)
