"""A drafter of a TensorRT bundle. Its network and its resampler are in native form, which has no operator for the
target's noise: they draft the most likely tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from redraft.batch import DraftBatch
from redraft.bundle.manifest import Bundle
from redraft.engines.cache_check import fault
from redraft.engines.cuda.transfer import Results, upload
from redraft.engines.drafter import CANDIDATES, NetworkDrafter
from redraft.engines.tensorrt import profiles
from redraft.engines.tensorrt.library import TensorRTLibrary
from redraft.engines.tensorrt.profiles import Bucket
from redraft.engines.tensorrt.session import HostBuffers, Session, Step, Stream, named_caches

ROWS = ("tokens", "pair_counts", "write_indices")
"""Inputs beside the features, for a drafter with a context."""


class TensorRTDrafter(NetworkDrafter):
    """The drafter of one method. With a context, sequences stand at their slots: a draft executes the first slots up to
    the last one in the batch, and the others write after max_len. Long prompts are ingested first, one by one."""

    def __init__(
        self,
        bundle: Bundle,
        library: TensorRTLibrary,
        name: str,
        caches: Tensor | None,
        stream: Stream,
        within_memory: Callable[[], AbstractContextManager[None]],
    ):
        """caches [2 * layers, slots, kv_heads, rows, head_size], of a drafter with a context. `within_memory` says what
        would fit where a call runs out of memory."""
        config, method = bundle.config, bundle.config.methods[name]
        super().__init__(config, method)
        self._limits = config.limits
        self._buckets = profiles.drafter(config.limits, self.reads_context, library.builds_on_gpu)
        self._session = Session(
            library,
            bundle.path / f"drafter.{name}.engine",
            self._buckets,
            profiles.drafter_shapes(self.reads_context),
            {} if caches is None else named_caches(caches),
            stream,
        )
        self._host, self._stream, self._caches = HostBuffers(stream), stream, caches
        self._within_memory = within_memory
        self._results = Results(stream.device)
        self._feature_size = config.target.feature_size
        self._resampler = _Resampler(bundle, library, name, stream) if self._levels else None

    @torch.inference_mode()
    def make_ready(self) -> None:
        """Make all that drafting takes: see `Session.make_ready`."""
        self._session.make_ready({"pair_counts": 1, "write_indices": self._limits.max_len})
        if self._resampler is not None:
            self._resampler.make_ready()

    @torch.inference_mode()
    def fault(self) -> str | None:
        """Describe a fault: a pair that does not become the first row of every cache, or another row that changes."""
        if self._caches is None:
            return None
        features, root = np.zeros((1, self._feature_size), np.float32), np.zeros(1, np.int32)
        draft = partial(self._run, DraftBatch.of_roots(features, root), {}, ())
        padded = self._buckets.steps[self._fitting(1, 1)].rows
        return fault(self._caches, draft, 0, 1, self._limits.max_len, padded)

    @torch.inference_mode()
    def _run(self, batch: DraftBatch, inputs: dict[str, np.ndarray], outputs: tuple[str, ...]) -> list[np.ndarray]:
        with self._stream.current(), self._within_memory():
            step, indices = self._ingest(batch) if self.reads_context else self._roots(batch)
            for name, array in inputs.items():
                placed = np.zeros((len(step.inputs[name]), *array.shape[1:]), array.dtype)
                placed[indices] = array
                self._host.send(placed, step.inputs[name], name)
            step.execute()
            chosen = upload(indices, self._stream.device)
            return self._results.fetch([_host_form(step.outputs[name].index_select(0, chosen)) for name in outputs])

    @torch.inference_mode()
    def _run_resampler(self, inputs: dict[str, np.ndarray], count: int) -> list[np.ndarray]:
        assert self._resampler is not None, "`resample` has chains only of a bundle with a resampler"
        with self._within_memory():
            return self._resampler.run(inputs, count)

    def _roots(self, batch: DraftBatch) -> tuple[Step, np.ndarray]:
        """The step for one pair per sequence, and where these stand in it."""
        count = len(batch.tokens)
        step = self._session.step(self._fitting(count, 1))
        self._send_features(self._on_device(batch), step, np.arange(count))
        self._host.send(batch.tokens, step.inputs["tokens"], "tokens")
        return step, np.arange(count)

    def _ingest(self, batch: DraftBatch) -> tuple[Step, np.ndarray]:
        """Ingest long prompts in chunks; then as `_roots`, for all pairs that are left."""
        firsts, lengths = batch.row_offsets[:-1].astype(np.int64), batch.cache_lengths.astype(np.int64)
        features = self._on_device(batch)
        for b, end in enumerate(batch.row_offsets[1:]):
            while (left := int(end) - firsts[b]) > self._limits.max_tree:
                count = min(left - 1, self._limits.prefill_chunk)
                self._ingest_chunk(batch, features, firsts[b], count, int(batch.slots[b]), lengths[b])
                firsts[b], lengths[b] = firsts[b] + count, lengths[b] + count
        counts = batch.row_offsets[1:] - firsts
        if counts.min() < 1:
            raise ValueError(f"sequence {counts.argmin()} has {counts.min()} pairs: expected at least 1")
        number = self._fitting(int(batch.slots.max()) + 1, int(counts.max()))
        bucket, step = self._buckets.steps[number], self._session.step(number)
        owners = np.repeat(np.arange(len(counts)), counts)
        within = np.concatenate([np.arange(count) for count in counts])
        pairs, slots = firsts[owners] + within, batch.slots[owners]
        tokens = np.zeros((bucket.sequences, bucket.rows), np.int32)
        tokens[slots, within] = batch.tokens[pairs]
        present, starts = (np.full(bucket.sequences, fill, np.int64) for fill in (1, self._limits.max_len))
        present[batch.slots], starts[batch.slots] = counts, lengths
        arrays: list[np.ndarray] = [tokens, present, starts]
        for name, array in zip(ROWS, arrays, strict=True):
            self._host.send(array, step.inputs[name], name)
        self._send_features(
            features.index_select(0, upload(pairs, features.device)), step, slots * bucket.rows + within
        )
        return step, batch.slots.astype(np.int64)

    def _ingest_chunk(
        self, batch: DraftBatch, features: Tensor, first: int, count: int, slot: int, length: int
    ) -> None:
        step, rows = self._session.prefill(Bucket(1, count), slot), slice(first, first + count)
        for name, array in zip(ROWS, (batch.tokens[None, rows], np.array([count]), np.array([length])), strict=True):
            step.inputs[name].copy_(upload(array, features.device))
        step.inputs["features"][0].copy_(features[rows])
        step.execute()

    def _on_device(self, batch: DraftBatch) -> Tensor:
        return torch.as_tensor(batch.features, device=self._stream.device)

    def _send_features(self, features: Tensor, step: Step, indices: np.ndarray) -> None:
        """Features [n, F] to these flat places of the step's, zeros elsewhere."""
        to = step.inputs["features"].flatten(0, -2).zero_()
        to.index_copy_(0, upload(indices, features.device), features.to(to.dtype))

    def _fitting(self, sequences: int, rows: int) -> int:
        number = self._buckets.fitting(sequences, rows)
        assert number is not None, "the limits that PairBuffers enforces"
        return number


class _Resampler:
    """The resampler: a network without context that drafts again from chains."""

    def __init__(self, bundle: Bundle, library: TensorRTLibrary, name: str, stream: Stream):
        limits, self._levels = bundle.config.limits, bundle.config.methods[name].chain_levels
        self._buckets = profiles.drafter(limits, reads_context=False, by_rows=library.builds_on_gpu)
        path, shapes = bundle.path / f"resampler.{name}.engine", profiles.drafter_shapes(reads_context=False)
        self._session = Session(library, path, self._buckets, shapes, {}, stream)
        self._host, self._stream, self._results = HostBuffers(stream), stream, Results(stream.device)

    def make_ready(self) -> None:
        """See `Session.make_ready`."""
        self._session.make_ready({})

    def run(self, inputs: dict[str, np.ndarray], count: int) -> list[np.ndarray]:
        """CANDIDATES of `count` sequences, from the inputs of `ChainBuffers`."""
        by_sequence = inputs | {"raw_logits": inputs["raw_logits"].reshape(count, self._levels, -1)}
        number = self._buckets.fitting(count, 1)
        assert number is not None, "the limits that ChainBuffers enforces"
        with self._stream.current():
            step = self._session.step(number)
            for name, array in by_sequence.items():
                self._host.send(array, step.inputs[name], name)
            step.execute()
            return self._results.fetch([_host_form(step.outputs[name][:count]) for name in CANDIDATES])


def _host_form(output: Tensor) -> Tensor:
    """Convert floats to float32."""
    return output.float() if output.is_floating_point() else output
