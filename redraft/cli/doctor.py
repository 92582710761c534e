"""`redraft doctor`: why a bundle is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from redraft.cli.options import ThreadsOption
from redraft.console.output import err, fail, out
from redraft.doctor import examine
from redraft.engines.ranks.process import is_first
from redraft.errors import BundleError


def main(
    bundle: Annotated[Path, typer.Argument(help="Engine bundle to examine.")],
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts of your own, to measure acceptance on them too; default: none."),
    ] = None,
    threads: ThreadsOption = None,
) -> None:
    """Say why a bundle is slow. Or why its drafts are rejected; the exit status is 1 where something is wrong."""
    wrong = False
    try:
        with err.status("measuring"):
            for finding in examine(bundle, prompts, threads):
                if is_first():
                    out.print(str(finding), markup=False)
                wrong |= bool(finding.remedy)
    except (BundleError, OSError, ValueError) as error:
        fail(f"redraft doctor: {error}", code=2)
    except KeyboardInterrupt:
        fail("redraft doctor: interrupted", code=130)
    raise typer.Exit(int(wrong))
