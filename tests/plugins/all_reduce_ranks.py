"""What every rank of the all-reduce's test runs; each prints that it is right. Without torch, whose import would take
longer than all sums."""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

from redraft.engines.ranks.process import unlink_shared_memory
from redraft.plugins import kernels
from redraft.plugins.operators.all_reduce import mpi


def main() -> None:
    comm = MPI.COMM_WORLD
    comm.Barrier()
    unlink_shared_memory()  # a rank that is killed would leave it
    mpi.connect(comm)
    kernels.set_threads(1)
    assert kernels.ranks() == comm.size
    rng = np.random.default_rng(5)
    for shape in ((1, 1), (1, 111), (3, 576), (128, 577)):
        parts = rng.standard_normal((comm.size, *shape)).astype(np.float32) * rng.choice([1e-4, 1, 1e4], shape)
        parts = parts.astype(np.float32)
        expected = parts[0].copy()
        for part in parts[1:]:
            expected += part
        for _ in range(3):
            found = kernels.all_reduce(parts[comm.rank])
            np.testing.assert_array_equal(found, expected)
        alone = kernels.all_reduce(parts[comm.rank, :1])
        np.testing.assert_array_equal(alone, found[:1])
    assert kernels.take_exchange_seconds() > 0
    assert kernels.take_exchange_seconds() == 0
    print(f"rank {comm.rank} of {comm.size} is right")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
