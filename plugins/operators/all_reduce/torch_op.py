"""`AllReduce` as a torch operator, `torch.ops.redraft.all_reduce`, for exported programs on any device. On GPUs: not
run."""

from __future__ import annotations

import torch
from torch import Tensor

from redraft.plugins.operators.all_reduce import reference


@torch.library.custom_op("redraft::all_reduce", mutates_args=())
def all_reduce(x: Tensor, ranks: int) -> Tensor:
    """See README.md; on CUDA through torch.distributed's default group (NCCL), which must be there. Raises RuntimeError
    where other than `ranks` are connected."""
    if x.is_cuda:
        return _sum_of_group(x, ranks)
    from redraft.plugins import kernels

    _expect(kernels.ranks(), ranks)
    return torch.from_numpy(kernels.all_reduce(x.float().contiguous().numpy())).to(x.dtype)


@all_reduce.register_fake
def _(x: Tensor, ranks: int) -> Tensor:
    return torch.empty_like(x)


def _sum_of_group(x: Tensor, ranks: int) -> Tensor:
    """Sum over torch.distributed's default group."""
    from torch import distributed

    _expect(distributed.get_world_size(), ranks)
    parts = x.new_empty(ranks * len(x), *x.shape[1:])
    distributed.all_gather_into_tensor(parts, x.contiguous())
    return reference.all_reduce(parts.view(ranks, *x.shape))


def _expect(connected: int, ranks: int) -> None:
    if connected != ranks:
        raise RuntimeError(f"the network is for {ranks} ranks: {connected} are connected")
