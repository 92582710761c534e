"""Errors that parts with few dependencies raise too, and the remedies that their messages name."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path


def program(name: str) -> str:
    """A program of this environment by a path that works where the environment is not activated: relative below the
    working folder."""
    path = Path(sys.prefix, "bin", name)
    if not path.exists():
        return name
    with suppress(FileNotFoundError):  # a working folder that was deleted
        folder = Path.cwd()
        return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
    return str(path)


class BundleError(RuntimeError):
    """A bundle that cannot be loaded; the message says why and what to rebuild."""


def how_to_rebuild(command: str = "") -> str:
    """The remedy for a bundle that cannot be used; `command` is the one of its manifest."""
    command = command or "redraft build"
    if command.startswith("redraft "):  # as manifests have it, which go to other machines
        command = f"{shlex.quote(program('redraft'))} {command.removeprefix('redraft ')}"
    return f"rebuild it with: {command}"


def place(location: tuple[int | str, ...]) -> str:
    """A field's place in a request as OpenAI writes it, such as `messages[0].content`; empty for the whole."""
    parts = (part for part in location if part != "[key]")
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
