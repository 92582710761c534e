"""What every rank of the CUDA operator's test runs over gloo and on the CPU: its connection, its sum, and the logits'
way to rank 0."""

from __future__ import annotations

import sys

import numpy as np
import torch
from mpi4py import MPI
from torch import distributed

from redraft.engines.ranks.process import unlink_shared_memory
from redraft.plugins.operators.all_reduce import nccl, torch_op
from redraft.plugins.operators.all_reduce.reference import all_reduce
from tests.plugins import gloo


def main() -> None:
    comm = MPI.COMM_WORLD
    comm.Barrier()
    unlink_shared_memory()  # a rank that is killed would leave it
    places = gloo.stand_in(comm.size)
    nccl.connect(comm)
    assert places == [comm.rank]
    rng = np.random.default_rng(5)
    for shape in ((1, 1), (3, 111), (128, 577)):
        parts = rng.standard_normal((comm.size, *shape)) * rng.choice([1e-4, 1, 1e4], (comm.size, *shape))
        parts = parts.astype(np.float32)
        found = torch_op._sum_of_group(torch.from_numpy(parts[comm.rank]), comm.size)
        assert torch.equal(found, all_reduce(torch.from_numpy(parts)))
    widths = [7, 4, 111]
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(5, sum(widths), generator=torch.Generator().manual_seed(0)).to(dtype)
        gathered = nccl.gather(whole.split(widths, 1)[comm.rank], widths)
        torch.testing.assert_close(gathered, whole[:0, : widths[comm.rank]] if comm.rank else whole, rtol=0, atol=0)
    print(f"rank {comm.rank} of {comm.size} is right")
    sys.stdout.flush()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
