"""Build an engine bundle, unless the one that is there was built from just what is asked for.

    python build/ensure_bundle.py [--named] OPTIONS OF redraft build

A bundle's manifest records what it was built from: the options of `redraft build`, the content of the model's,
drafters' and other files that they name, and the code that exports and compiles. All of it is compared with what is
there now. Paths do not matter, nor when a file was written. A bundle that cannot be loaded here is built again. With
--named the bundle's folder is the user's choice: one of other settings or files is refused, not replaced. Nothing here
imports torch, so that it can be asked each time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from redraft.bundle.manifest import MANIFEST, Manifest
from redraft.compiler.built_from import CODE, built_from, differences, options_of, why_unusable
from redraft.errors import BundleError

NAMED = "--named"
SHOWN = 4
"""Differences that a message names."""


def is_built(arguments: list[str], named: bool) -> bool:
    """Whether the bundle is there that `redraft build` with these arguments would build. Ends the process where a
    folder that the user `named` holds another one."""
    output = Path(options_of(arguments).get("--output", "."))
    if not (output / MANIFEST).is_file():
        return False
    try:
        manifest = Manifest.read(output)
        there = manifest.built_from
        changes = differences(there, built_from(arguments, there.files if there else None))
    except BundleError as error:
        changes = [str(error)]
    unusable = False
    if not changes:
        try:
            changes = why_unusable(output, manifest)
        except BundleError as error:
            changes = [str(error)]
        unusable = bool(changes)
    if not changes:
        return True
    more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    why = "; ".join(changes[:SHOWN]) + more
    if named and not unusable and changes != [CODE]:
        sys.exit(
            f"{output} is another bundle than the one asked for: {why}. Remove it to build that one in its place, "
            f"choose another folder, or serve it as it is: redraft serve --bundle {output}"
        )
    print(f"{output} is built again: {why}", flush=True)
    return False


def main(arguments: Sequence[str]) -> None:
    """Become `redraft build` unless its bundle is there."""
    options = [argument for argument in arguments if argument != NAMED]
    if not is_built(options, NAMED in arguments):
        os.execv(sys.executable, [sys.executable, "-m", "redraft.cli", "build", *options])
