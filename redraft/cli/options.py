"""Values of options that several commands have."""

from __future__ import annotations

import typer

from redraft.bundle.backends import BACKENDS, Backend, backend_of

BACKEND_NAMES = f"[{'|'.join(BACKENDS)}]"


def backend_named(name: object) -> Backend:
    """The value of --backend."""
    try:
        return backend_of(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
