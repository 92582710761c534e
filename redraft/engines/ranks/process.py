"""The process of a rank, which leaves nothing when it ends."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

RANK_VARIABLE = "PMI_RANK"
"""Environment variable in which MPICH's launchers tell a process its rank."""

_MAPPED = re.compile(r"/dev/shm/mpich_shm_\w+")


def is_first() -> bool:
    """Whether this process is rank 0, or the only one: the other ranks would print what it prints once more."""
    return os.environ.get(RANK_VARIABLE, "0") == "0"


def unlink_shared_memory() -> None:
    """Remove the names of the shared memory that MPICH has opened. Mapped memory stays until the last rank that maps it
    ends, in whatever way; MPICH itself removes it only after a proper end. All ranks of the machine must have passed
    MPI's initialization."""
    for name in set(_MAPPED.findall(Path("/proc/self/maps").read_text())):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def end_all(status: int) -> None:
    """End the processes of all ranks, if this is one: the others would wait for it, even in MPI's initialization. MPI's
    launchers do not end them where a rank ends by itself."""
    if RANK_VARIABLE in os.environ:
        with contextlib.suppress(ImportError, RuntimeError):
            from mpi4py import MPI

            unlink_shared_memory()
            MPI.COMM_WORLD.Abort(status)
