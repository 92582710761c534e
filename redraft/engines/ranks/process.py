"""A rank as a process: it leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

RANK_VARIABLE = "PMI_RANK"
"""Environment variable in which MPICH's launchers tell a process its rank."""

_MAPPED = re.compile(r"/dev/shm/mpich_shm_\w+")


def unlink_shared_memory() -> None:
    """Remove the names of the shared memory that MPICH has opened. What is mapped stays, and goes with the last rank
    that maps it, however that ends; MPICH itself removes it in a proper end alone. All ranks of the machine must have
    passed MPI's initialization."""
    for name in set(_MAPPED.findall(Path("/proc/self/maps").read_text())):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def end_all(status: int) -> None:
    """End the processes of all ranks, where this is one: the others would wait for it, as soon as in MPI's
    initialization. MPI's launchers do not see to it where a rank ends by itself."""
    if RANK_VARIABLE in os.environ:
        with contextlib.suppress(ImportError, RuntimeError):
            from mpi4py import MPI

            unlink_shared_memory()
            MPI.COMM_WORLD.Abort(status)
