"""Tensor parallelism: a process for each shard of the target, all of which execute every batch.

Rank 0 drafts, verifies and decides; the other ranks learn of each batch from it and know nothing else. Ranks that
decided for themselves would drift apart.
"""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from redraft import bound
from redraft.batch import TargetBatch
from redraft.bundle.backends import OPENVINO
from redraft.bundle.manifest import Bundle
from redraft.engines.api import Engine, EngineAround, Gather, LogitRows, Meanwhile, Samplers
from redraft.engines.features import Features
from redraft.engines.host_buffers import RowBuffers
from redraft.engines.ranks import process as rank_process
from redraft.errors import BundleError, install, program

if TYPE_CHECKING:
    from mpi4py import MPI

SPIN_S, NAP_SHARE, MAX_NAP_S = 0.02, 0.05, 0.01
"""A waiting rank busy-polls for SPIN_S, then sleeps NAP_SHARE of the time waited so far, at most MAX_NAP_S: an idle
rank costs half a percent of a core."""
Result = TypeVar("Result")
Copy: TypeAlias = tuple[int, int, int]
"""Source slot, target slot and rows: the arguments of `Engine.copy`."""


class ParallelEngine(EngineAround):
    """Rank 0's engine, whose target all ranks execute together, around the engine of its shard, which gathers the
    logits of all. Rank 0 has all drafters."""

    def __init__(self, engine: Engine, ranks: Ranks):
        super().__init__(engine)
        self.ranks = ranks
        self._rows = RowBuffers(ranks.config.limits, ranks.config.target.vocab_size)
        self._open, self._in_step = True, False
        self._copies: list[Copy] = []
        atexit.register(self.close)

    def execute(
        self, batch: TargetBatch, samplers: Samplers = None, meanwhile: Meanwhile | None = None
    ) -> tuple[LogitRows, Features | None]:
        """See `Engine.execute`. Raises ValueError for a batch outside of the bundle's limits, before others see
        it, RuntimeError after a step that failed: the ranks may stand at different places in it."""
        self._rows.check(batch)
        if self._in_step:
            raise RuntimeError("a step failed, so the ranks are out of step: load the bundle again")
        self._in_step = True
        self.ranks.send(batch, self._copies)
        self._copies = []
        outputs = super().execute(batch, samplers, meanwhile)
        self._in_step = False
        return outputs

    def copy(self, source: int, target: int, rows: int) -> None:
        """See `Engine.copy`; the other ranks do it before the next batch."""
        super().copy(source, target, rows)
        self._copies.append((source, target, rows))

    def close(self) -> None:
        """See `Engine.close`; the other ranks stop too. A step that failed may leave them waiting for ever: then this
        ends the processes of all ranks."""
        if not self._open:
            return
        self._open = False
        if self._in_step:
            self.ranks.abort()
        self.ranks.send(None)
        super().close()
        self.ranks.disconnect()


def follow(engine: Engine, ranks: Ranks) -> None:
    """Execute rank 0's batches until it stops."""
    while (message := ranks.receive()) is not None:
        copies, batch = message
        for copy in copies:
            engine.copy(*copy)
        engine.execute(batch)
    engine.close()
    ranks.disconnect()


def load_parallel(bundle: Bundle, threads: int | None, load: Callable[[int, int, Gather], Engine]) -> Engine:
    """Rank 0's engine of a bundle for several ranks, from `load(threads, rank, gather)`; `threads` None is this rank's
    share of the cores that its machine's ranks may use.

    On any other rank it returns only by SystemExit, when rank 0 has closed its engine. Raises BundleError on all ranks
    where one of them cannot load its shard.
    """
    ranks = Ranks.connect(bundle)
    ranks.agree(lambda: ranks.require_same(bundle))
    ranks.agree(ranks.connect_operators)
    engine = ranks.agree(lambda: load(threads or ranks.cores(), ranks.rank, ranks.gather))
    test_together(engine, ranks)
    if ranks.rank == 0:
        return ParallelEngine(engine, ranks)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 answers them
    try:
        follow(engine, ranks)
    except Exception:
        traceback.print_exc()
        ranks.abort()
    raise SystemExit(0)


def test_together(engine: Engine, ranks: Ranks) -> None:
    """The engine's own test, if it has one. A rank that fails ends all of them, as others may wait for it in a step."""
    try:
        getattr(engine, "self_test", lambda: None)()
    except Exception as error:
        print(f"rank {ranks.rank}: {error}", file=sys.stderr, flush=True)
        ranks.abort()


class Ranks:
    """The processes of a bundle's ranks, of which this one is number `rank`. They serve one bundle as long as they
    live."""

    connected = False

    def __init__(self, comm: MPI.Intracomm, bundle: Bundle):
        self.comm, self.config = comm, bundle.config
        self.rank: int = comm.rank
        self._gather: Gather = self._gather_arrays
        self.disconnect: Callable[[], None] = lambda: None
        """Ends the connection between GPUs, where there is one; called after the engine is closed."""
        self._logits = np.empty((0, self.config.target.vocab_size), np.float32)

    @classmethod
    def connect(cls, bundle: Bundle) -> Ranks:
        """Raises BundleError where there is no MPI, where other than the bundle's number of ranks were started, and
        for a second bundle: the other ranks follow the first."""
        count = bundle.config.tensor_parallel
        start = f"start it with: {shlex.join([program('mpiexec'), '-n', str(count), *sys.orig_argv])}"
        try:
            import mpi4py

            mpi4py.rc.thread_level = "serialized"
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise BundleError(
                f"{bundle.path} is split over {count} ranks, for which MPI is missing ({reason}): "
                f"{install('ranks')}; then {start}"
            ) from None
        if cls.connected:
            raise BundleError(
                f"{bundle.path}: this program's ranks execute another bundle already; expected one for one rank"
            )
        world = MPI.COMM_WORLD
        if world.size != count:
            started = f"{world.size} {'was' if world.size == 1 else 'were'} started"
            raise BundleError(f"{bundle.path} is split over {count} ranks, {started}; {start}")
        comm = world.Dup()
        cls.connected = True
        bound.end_with_parent()
        rank_process.unlink_shared_memory()
        return cls(comm, bundle)

    def require_same(self, bundle: Bundle) -> None:
        """Raises BundleError where rank 0 has other networks or weights: hosts may have different bundles at one
        path."""
        own = {name: entry.sha256 for name, entry in bundle.manifest.files.items()}
        first = self.comm.bcast(own)
        others = sorted(name for name in own.keys() | first.keys() if own.get(name) != first.get(name))
        if others:
            raise BundleError(
                f"{bundle.path} is another bundle than rank 0's: {others[0]}{' and others' * (len(others) > 1)}"
            )

    def connect_operators(self) -> None:
        """Let the networks' sums reach the other ranks. Raises BundleError or RuntimeError."""
        if self.config.backend.needs_gpu:
            from redraft.engines.cuda import device as gpu

            remedy = "a bundle built with --tp 1"
            self.agree(lambda: gpu.require_capability(gpu.device(), "sums over GPUs", or_take=remedy))
        else:
            from redraft.plugins import kernels
            from redraft.plugins.operators.all_reduce import mpi

            self.agree(lambda: mpi.connect(self.comm))
            kernels.set_threads(1)
            if self.config.backend == OPENVINO:
                return
            import torch

            if not any(self.comm.allgather(torch.cuda.is_available())):
                self._gather = lambda logits: torch.from_numpy(self._gather_arrays(logits.float().numpy()))
                return
        from redraft.plugins.operators.all_reduce import nccl

        nccl.connect(self.comm)
        self.disconnect = nccl.disconnect
        self._gather = lambda logits: nccl.gather(logits, [shard.vocab_size for shard in self.config.shards])

    def cores(self) -> int:
        """This rank's share of the cores that the ranks on its machine may use, at least 1."""
        from mpi4py import MPI

        local = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        count = local.size
        local.Free()
        return max(1, len(os.sched_getaffinity(0)) // count)

    def agree(self, act: Callable[[], Result]) -> Result:
        """Do something on all ranks. Raises BundleError on all of them where it raises an Exception on any."""
        result, failure = None, None
        try:
            result = act()
        except Exception as error:
            failure = str(error) or type(error).__name__
        for rank, message in enumerate(self.comm.allgather(failure)):
            if message is not None:
                raise BundleError(message if rank == 0 else f"rank {rank}: {message}")
        return result  # type: ignore[return-value]

    def send(self, batch: TargetBatch | None, copies: list[Copy] | None = None) -> None:
        """Send a batch from rank 0 to all others, and the copies before it; None: stop."""
        message = np.zeros(0, np.int32) if batch is None else pack(batch, copies or [])
        for rank in range(1, self.comm.size):
            self.comm.Send(message, rank)

    def receive(self) -> tuple[list[Copy], TargetBatch] | None:
        """Wait for the next batch from rank 0, and the copies before it; None: it stops."""
        from mpi4py import MPI

        started, status = time.monotonic(), MPI.Status()
        while not self.comm.Iprobe(0, status=status):
            waited = time.monotonic() - started
            if waited < SPIN_S:
                os.sched_yield()
            else:
                time.sleep(min(NAP_SHARE * waited, MAX_NAP_S))
        message = np.empty(status.Get_count(MPI.INT32_T), np.int32)
        self.comm.Recv(message, 0)
        return unpack(message) if len(message) else None

    def gather(self, logits: Any) -> Any:
        """Gather logits from GPU to GPU, else from host to host; valid until the next call. See `Gather`."""
        return self._gather(logits) if len(logits) else logits

    def _gather_arrays(self, logits: np.ndarray) -> np.ndarray:
        from mpi4py import MPI

        rows, vocab = len(logits), self.config.target.vocab_size
        if self.rank:
            self.comm.Send(logits, 0)
            return logits[:0]
        if rows > len(self._logits):
            self._logits = np.empty((rows, vocab), np.float32)
        out, first = self._logits[:rows], 0
        flat = out.reshape(-1)
        for rank, shard in enumerate(self.config.shards):
            if rank:
                columns = MPI.FLOAT.Create_vector(rows, shard.vocab_size, vocab).Commit()
                self.comm.Recv([flat[first:], 1, columns], rank)
                columns.Free()
            else:
                out[:, : shard.vocab_size] = logits
            first += shard.vocab_size
        return out

    def abort(self) -> None:
        """End the processes of all ranks."""
        self.comm.Abort(1)


def pack(batch: TargetBatch, copies: list[Copy]) -> np.ndarray:
    """Pack a batch and the copies before it into one array int32: the sizes T, words, B, C, R and the number of copies,
    then the batch's arrays in their order and the copies."""
    arrays = [getattr(batch, field.name) for field in fields(batch)]
    sizes = [*batch.tree_mask.shape, len(batch.slots), len(batch.commit_src), len(batch.logit_rows), len(copies)]
    arrays = [np.array(sizes, np.int32), *arrays, np.array(copies, np.int32)]
    return np.concatenate([array.reshape(-1) for array in arrays])


def unpack(message: np.ndarray) -> tuple[list[Copy], TargetBatch]:
    """The copies and the batch of a message of `pack`, whose arrays are views of it."""
    rows, words, sequences, commits, logits, copies = message[:6].tolist()
    sizes = (rows, rows, sequences + 1, sequences, sequences, rows * words, commits, sequences + 1, logits, 3 * copies)
    *arrays, copied = np.split(message[6:], np.cumsum(sizes)[:-1])
    arrays[5] = arrays[5].reshape(rows, words)
    return [(source, target, count) for source, target, count in copied.reshape(-1, 3).tolist()], TargetBatch(*arrays)
