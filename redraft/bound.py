"""A process that the kernel ends when the process that started it ends, however that ends.

`python bound.py PARENT PROGRAM ...` becomes PROGRAM, unless PARENT has gone meanwhile. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process when its parent ends, or when the parent's thread that started it does: also
    where it waits inside of MPI, or is stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))


def end_group_with_parent() -> None:
    """Kill this process's group, all that it has started, when its parent ends or SIGTERM comes. The process leads a
    group of its own, or it would take its parent's with it."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    end_with_parent(signal.SIGTERM)


def bound(command: list[str]) -> list[str]:
    """The command line that runs `command` as long as the calling process lives."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    end_with_parent()
    if os.getppid() == int(sys.argv[1]):
        os.execvp(sys.argv[2], sys.argv[2:])
