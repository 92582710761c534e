"""Connects the CUDA operator's ranks: torch.distributed over NCCL. Not run on a GPU yet."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import torch
from torch import distributed

if TYPE_CHECKING:
    from mpi4py import MPI


def connect(comm: MPI.Intracomm) -> None:
    """Give each rank of a machine a GPU of its own, and make these ranks torch.distributed's default group. Raises
    ValueError for more ranks than GPUs on a machine, RuntimeError where torch lacks NCCL."""
    from mpi4py import MPI

    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place, count = local.rank, local.size
    local.Free()
    if count > torch.cuda.device_count():
        raise ValueError(f"{count} ranks on {socket.gethostname()}: it has {torch.cuda.device_count()} GPUs")
    if not distributed.is_nccl_available():
        raise RuntimeError(f"torch {torch.__version__} has no NCCL; install torch's CUDA build (requirements-gpu.txt)")
    torch.cuda.set_device(place)
    with socket.create_server(("", 0)) as server:
        address = comm.bcast((socket.gethostname(), server.getsockname()[1]))
    distributed.init_process_group(
        "nccl", init_method=f"tcp://{address[0]}:{address[1]}", rank=comm.rank, world_size=comm.size
    )
