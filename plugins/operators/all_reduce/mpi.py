"""Connects the CPU operators to the MPI library that mpi4py has loaded."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from redraft.plugins import kernels

if TYPE_CHECKING:
    from mpi4py import MPI


def connect(comm: MPI.Intracomm) -> None:
    """Sum over this communicator's ranks from now on, each of which must do the same. It stays open: nothing else may
    be sent over it, so it is a copy."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)
    iallgather, test = (_address(library, name) for name in ("MPI_Iallgather", "MPI_Test"))
    duplicate = comm.Dup()
    kernels.connect_ranks(iallgather, test, MPI._handleof(duplicate), MPI._handleof(MPI.FLOAT), duplicate.size)


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address
