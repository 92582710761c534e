"""A process that the kernel kills when the process that started it ends, however that ends.

`python bound.py PARENT PROGRAM ...` becomes PROGRAM, unless PARENT has gone meanwhile. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, or when the parent's thread that started it does: also
    where it waits inside of MPI, or is stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def bound(command: list[str]) -> list[str]:
    """The command line that runs `command` as long as the calling process lives."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    end_with_parent()
    if os.getppid() == int(sys.argv[1]):
        os.execvp(sys.argv[2], sys.argv[2:])
