"""Lets ranks on the CPU connect as ranks on GPUs do: gloo, torch's library for CPUs, is in NCCL's place."""

from __future__ import annotations

import torch
from torch import distributed

from redraft.plugins.operators.all_reduce import nccl


def stand_in(count: int) -> list[int]:
    """For `count` ranks. Returns the list of the GPUs that this rank will have chosen."""
    nccl.BACKEND, nccl.DEVICE = "gloo", "cpu"
    distributed.is_nccl_available = lambda: True
    torch.cuda.device_count = lambda: count
    chosen: list[int] = []
    torch.cuda.set_device = chosen.append
    return chosen
