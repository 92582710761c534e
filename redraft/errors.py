"""Errors that parts with few dependencies raise too, and the remedies that their messages name.

Bundles are built and tuned in a clone of the repository: a wheel has the run time only.
"""

from __future__ import annotations

from pathlib import Path

BUILD = "build/build_engines.py"
IN_CLONE = "" if (Path(__file__).resolve().parents[1] / BUILD).is_file() else " in a clone of redraft"
"""Follows the commands of a clone where this is a wheel."""


class BundleError(RuntimeError):
    """A bundle that cannot be loaded; the message says why and what to rebuild."""


def how_to_rebuild(command: str = "") -> str:
    """The remedy for a bundle that cannot be used; `command` is the one of its manifest."""
    return f"rebuild it{IN_CLONE} with: {command or f'python {BUILD}'}"


def place(location: tuple[int | str, ...]) -> str:
    """A field's place in a request as OpenAI writes it, such as `messages[0].content`; empty for the whole."""
    parts = (part for part in location if part != "[key]")
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
