"""The target of a TensorRT bundle: ragged rows for engines in plugin form, padded rows for those in native form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from redraft.batch import TargetBatch
from redraft.bundle.config import BundleConfig
from redraft.engines.cuda.transfer import upload
from redraft.engines.host_buffers import RowBuffers
from redraft.engines.tensorrt import profiles
from redraft.engines.tensorrt.library import TensorRTLibrary
from redraft.engines.tensorrt.profiles import Bucket
from redraft.engines.tensorrt.session import HostBuffers, Session, Step, Stream, named_caches

BITS = 32
HIDDEN_SCORE = -3e4
"""Added to the scores of rows that must not be seen, as in the exported networks."""


class PluginTarget:
    """One execute for trees and prefill chunks together; the kernels commit."""

    def __init__(
        self,
        path: Path,
        config: BundleConfig,
        library: TensorRTLibrary,
        caches: Sequence[Tensor],
        stream: Stream,
        communicator: Any,
    ):
        """Load the engine at `path`. Raises as `Session` does."""
        limits = config.limits
        self._rows = RowBuffers(limits, config.target.vocab_size)
        self._buckets, shapes = profiles.plugin_target(limits), profiles.plugin_target_shapes(limits)
        self.session = Session(library, path, self._buckets, shapes, named_caches(caches), stream, communicator)
        self._host = HostBuffers(stream)

    @property
    def step_shapes(self) -> list[tuple[int, int]]:
        """See `Engine.step_shapes`."""
        return [(bucket.sequences, bucket.rows) for bucket in self._buckets.steps]

    def execute(self, batch: TargetBatch, by_prefill: bool = False) -> tuple[Tensor, Tensor | None]:
        """Enqueue a step: logits [R, V] and features [T, F] on the device, valid until the next one. `by_prefill`
        executes it by the prefill profile, though a step holds it."""
        self._rows.check(batch)
        rows, sequences, logits = len(batch.input_ids), len(batch.slots), len(batch.logit_rows)
        number = None if by_prefill else self._buckets.fitting(sequences, rows)
        if number is None:
            step = self.session.prefill(Bucket(sequences, rows, max(logits, 1)))
        else:
            step = self.session.step(number)
        for name, array in self._rows.fill(batch).items():
            self._host.send(array[: len(step.inputs[name])], step.inputs[name], name)
        step.execute()
        features = step.outputs.get("features")
        return step.outputs["logits"][:logits], None if features is None else features[:rows]


class NativeTarget:
    """A target whose sequences stand at their slots: a step executes the first slots up to the last one in the batch.
    Sequences that are not in the batch write after max_len, where nothing is kept. More rows than a tree's are a
    prefill chunk, which is executed on its own. Accepted rows are moved first."""

    def __init__(
        self,
        path: Path,
        config: BundleConfig,
        library: TensorRTLibrary,
        caches: Tensor,
        stream: Stream,
        communicator: Any,
    ):
        """Load the engine at `path`. Raises as `Session` does."""
        self._limits = config.limits
        self._check = RowBuffers(self._limits, config.target.vocab_size).check
        self._buckets, self._caches = profiles.native_target(self._limits, library.builds_on_gpu), caches
        shapes = profiles.native_target_shapes
        self.session = Session(library, path, self._buckets, shapes, named_caches(caches), stream, communicator)
        self._host, self._device = HostBuffers(stream), stream.device

    @property
    def step_shapes(self) -> list[tuple[int, int]]:
        """See `Engine.step_shapes`; the rows of all slots."""
        return [(bucket.sequences, bucket.all_rows) for bucket in self._buckets.steps]

    def execute(self, batch: TargetBatch) -> tuple[Tensor, Tensor | None]:
        """Enqueue a step: logits [R, V] and features [T, F] on the device, valid until the next one."""
        self._check(batch)
        self._commit(batch)
        owners = np.repeat(np.arange(len(batch.slots)), np.diff(batch.row_offsets))
        large = np.diff(batch.row_offsets) > self._limits.max_tree
        rows = np.flatnonzero(~large[owners])
        parts = [self._step(batch, rows, owners)] if len(rows) else []
        parts += [self._chunk(batch, b, np.flatnonzero(owners == b), owners) for b in np.flatnonzero(large).tolist()]
        logits = self._in_order([part.wanted for part in parts], [part.logits for part in parts])
        states = [part.features for part in parts if part.features is not None]
        return logits, self._in_order([part.rows for part in parts], states) if states else None

    def _in_order(self, rows: list[np.ndarray], parts: list[Tensor]) -> Tensor:
        """One tensor of parts whose rows stand at these rows of it."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts).index_select(0, upload(np.concatenate(rows).argsort(), self._device))

    def _step(self, batch: TargetBatch, rows: np.ndarray, owners: np.ndarray) -> _Part:
        """Execute trees and small chunks: these rows of the batch, whose sequences are `owners`."""
        slots, longest = batch.slots[owners[rows]], int((rows - batch.row_offsets[owners[rows]]).max()) + 1
        number = self._buckets.fitting(int(slots.max()) + 1, longest)
        assert number is not None, "the limits that check() enforces"
        bucket, step = self._buckets.steps[number], self.session.step(number)
        starts = np.full(bucket.sequences, self._limits.max_len, np.int64)
        starts[slots] = batch.cache_lengths[owners[rows]]
        indices = slots * bucket.rows + rows - batch.row_offsets[owners[rows]]
        return self._execute(step, batch, bucket, starts, rows, indices, name="step")

    def _chunk(self, batch: TargetBatch, b: int, rows: np.ndarray, owners: np.ndarray) -> _Part:
        """Execute all rows of a sequence."""
        logits = int(np.isin(batch.logit_rows, rows).sum())
        bucket = Bucket(1, len(rows), max(logits, 1))
        step = self.session.prefill(bucket, int(batch.slots[b]))
        starts = batch.cache_lengths[b : b + 1].astype(np.int64)
        return self._execute(step, batch, bucket, starts, rows, np.arange(len(rows)), name=f"chunk {b}")

    def _execute(
        self,
        step: Step,
        batch: TargetBatch,
        bucket: Bucket,
        starts: np.ndarray,
        rows: np.ndarray,
        places: np.ndarray,
        name: str,
    ) -> _Part:
        """Execute rows of the batch at places of [sequences, rows], whose sequences' first rows stand at `starts`."""
        shape = (bucket.sequences, bucket.rows)
        place_of = np.full(len(batch.input_ids), -1)
        place_of[rows] = places
        wanted = np.flatnonzero(place_of[batch.logit_rows] >= 0)
        words = np.zeros((shape[0] * shape[1], batch.tree_mask.shape[1]), np.int32)
        words[places] = batch.tree_mask[rows]
        inputs = {
            "input_ids": _placed(batch.input_ids[rows], places, shape),
            "positions": _placed(batch.positions[rows], places, shape),
            "write_indices": starts,
            "logit_rows": place_of[batch.logit_rows[wanted]],
        }
        for key, array in inputs.items():
            self._host.send(array, step.inputs[key], f"{name} {key}")
        mask, first = step.inputs["mask"], step.inputs["write_indices"]
        mask.copy_(score_mask(upload(words.reshape(*shape, -1), self._device), first, mask.shape[-1])[:, None])
        step.execute()
        features = step.outputs.get("features")
        if features is not None:
            features = features.index_select(0, upload(places, self._device))
        return _Part(rows, wanted, step.outputs["logits"][: len(wanted)], features)

    def _commit(self, batch: TargetBatch) -> None:
        """Move the rows of the accepted paths, in all layers at once."""
        counts = np.diff(batch.commit_offsets)
        owners = np.repeat(np.arange(len(counts)), counts)
        base = (batch.cache_lengths - counts)[owners]
        sources, targets = base + batch.commit_src, base + np.arange(len(owners)) - batch.commit_offsets[owners]
        moved = sources != targets
        if moved.any():
            moves = np.stack([batch.slots[owners], sources, targets])[:, moved].astype(np.int64)
            slots, source, target = upload(moves, self._device)
            self._caches[:, slots, :, target] = self._caches[:, slots, :, source]


class _Part(NamedTuple):
    """The results of one execute, for some rows of a batch and some of its logit rows."""

    rows: np.ndarray
    wanted: np.ndarray
    logits: Tensor
    features: Tensor | None


def score_mask(words: Tensor, starts: Tensor, cache_rows: int) -> Tensor:
    """float [B, N, cache_rows], added to the scores: 0 where a row sees a cache row. words int32 [B, N, W] are the tree
    masks of the rows (see `TargetBatch`), starts int64 [B] the cache rows of the sequences' first rows."""
    behind = torch.arange(cache_rows, device=words.device) - starts[:, None]
    bit = behind.clamp(0, words.shape[2] * BITS - 1)
    index = (bit // BITS)[:, None].expand(-1, words.shape[1], -1)
    marked = ((words.gather(2, index) >> (bit % BITS)[:, None]) & 1).bool() & (behind == bit)[:, None]
    row = torch.arange(words.shape[1], device=words.device)[:, None]
    behind = behind[:, None]
    causal = (words == 0).all(2, keepdim=True)
    seen = (behind < 0) | (behind == row) | torch.where(causal, behind <= row, marked)
    return torch.where(seen, 0.0, HIDDEN_SCORE)


def _placed(values: np.ndarray, indices: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Values at flat places of [sequences, rows], zeros elsewhere."""
    placed = np.zeros(shape, values.dtype)
    placed.reshape(-1)[indices] = values
    return placed
