"""Connects ranks on GPUs: torch.distributed over NCCL, whose communicator TensorRT takes and by which logits come to
rank 0."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from redraft.errors import reinstall_torch

if TYPE_CHECKING:
    from mpi4py import MPI


BACKEND, DEVICE = "nccl", "cuda"
CAPSULE = b"ncclComm_t"
MEETING = timedelta(seconds=60)
"""The ranks, which MPI has connected, must have found each other by then: before the service takes them for hung."""


def connect(comm: MPI.Intracomm) -> None:
    """Give each rank of a machine a GPU of its own, and make these ranks torch.distributed's default group. Raises
    RuntimeError that names the remedy: on all ranks where torch lacks NCCL or a machine has fewer GPUs than ranks, on
    those that notice where NCCL does not connect them. Ranks of one machine listen only on its loopback."""
    from mpi4py import MPI

    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    rank, count = local.rank, local.size
    local.Free()
    for failure in comm.allgather(_failure(count)):
        if failure:
            raise RuntimeError(failure)
    torch.cuda.set_device(rank)
    address = "127.0.0.1" if count == comm.size else ""
    if address:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    server, failure = None, None
    if comm.rank == 0:
        try:
            server = socket.create_server((address, 0))
        except OSError as error:
            failure = f"rank 0 cannot listen on {address or 'its addresses'}, where NCCL's ranks meet: {error}"
    host, port, failure = comm.bcast((address or socket.gethostname(), server and server.getsockname()[1], failure))
    if failure:
        raise RuntimeError(failure)
    try:
        if server:
            print(f"connecting {comm.size} ranks by NCCL at {host}", file=sys.stderr, flush=True)
        listens = server.detach() if server else None
        store = distributed.TCPStore(host, port, comm.size, server is not None, MEETING, master_listen_fd=listens)
        distributed.init_process_group(BACKEND, store=store, rank=comm.rank, world_size=comm.size)
        distributed.all_reduce(torch.zeros(1, device=DEVICE))  # NCCL connects in a device's first call
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"NCCL does not connect the {comm.size} ranks ({error}): NCCL_DEBUG=INFO says why, between machines "
            "NCCL_SOCKET_IFNAME chooses the interface; a bundle built with --tp 1 needs no NCCL"
        ) from None


def disconnect() -> None:
    """End the default group and its NCCL communicator, on all ranks, after all that uses it."""
    distributed.destroy_process_group()


def communicator() -> Any:
    """The connected ranks' `ncclComm_t`, in a capsule as TensorRT's Python layer takes it; torch's to destroy. Raises
    RuntimeError where there is none for this rank's GPU."""
    assert distributed.group.WORLD is not None, "connect() comes before"
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    backend: Any = distributed.group.WORLD._get_backend(torch.device("cuda"))
    if not (pointer := backend._comm_ptr()):
        raise RuntimeError(f"NCCL is not connected on GPU {torch.cuda.current_device()}, which this rank executes on")
    return new(pointer, CAPSULE, None)


def gather(part: Tensor, widths: Sequence[int]) -> Tensor:
    """Each rank's [R, columns], `widths` of them by rank, side by side on rank 0; the others get no rows. Enqueued."""
    if distributed.get_rank():
        parts = [part[:0]]
        transfers = [distributed.P2POp(distributed.isend, part.contiguous(), 0)]
    else:
        parts = [part, *(part.new_empty(len(part), width) for width in widths[1:])]
        transfers = [distributed.P2POp(distributed.irecv, parts[rank], rank) for rank in range(1, len(parts))]
    for transfer in distributed.batch_isend_irecv(transfers):
        transfer.wait()
    return torch.cat(parts, 1)


def _failure(count: int) -> str | None:
    """Reason why a machine cannot have `count` ranks."""
    if not distributed.is_nccl_available():
        return (
            f"NCCL, by which ranks on GPUs exchange their sums, is not in torch {torch.__version__}: install PyPI's, "
            f"{reinstall_torch()}, or build the bundle with --tp 1"
        )
    if count > torch.cuda.device_count():
        return (
            f"{count} ranks on {socket.gethostname()}, which shows {torch.cuda.device_count()} GPUs, and each needs "
            "one: build the bundle for fewer ranks (--tp 1 takes one GPU), or name more machines in "
            "--hostfile"
        )
    return None
