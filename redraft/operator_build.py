"""The compilation of the CPU operators as a process of its own: it and its compilers end with the command."""

from __future__ import annotations

import subprocess
import sys

from redraft.bound import bound, end_group_with_parent
from redraft.plugins.library import BuildError, are_built, build


def build_operators() -> None:
    """Build what `library.build` builds, where that was not done, and wait for it. Raises BuildError."""
    if are_built():
        return
    process = build_apart()
    _, error = process.communicate()
    if process.returncode:
        raise BuildError(error.strip() or f"compiling the CPU operators ended with status {process.returncode}")


def build_apart() -> subprocess.Popen[str]:
    """Begin to build what `library.build` builds. The process says on stderr what fails."""
    return subprocess.Popen(
        bound([sys.executable, "-m", __name__]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


if __name__ == "__main__":
    end_group_with_parent()
    try:
        build()
    except (BuildError, OSError) as error:
        sys.exit(str(error))
