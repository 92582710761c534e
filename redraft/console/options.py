"""Checks of command-line options beyond those that typer has."""

from __future__ import annotations

import math

import typer


def finite(value: float | None) -> float | None:
    """An option's number, as a callback of typer. Raises BadParameter for inf and nan, which typer's bounds let by."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a number, got {value}")
    return value
