"""The compilation of the CPU operators as a process of its own: it and its compilers end with the command."""

from __future__ import annotations

import subprocess
import sys

from redraft.bound import bound, end_group_with_parent
from redraft.plugins.library import BuildError, kernels_path


def build_apart() -> subprocess.Popen[str]:
    """Begin to build what `kernels_path` builds. The process says on stderr what fails."""
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
        kernels_path()
    except (BuildError, OSError) as error:
        sys.exit(str(error))
