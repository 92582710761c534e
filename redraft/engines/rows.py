"""Fixed host buffers for a step's rows, so that an engine sees the same addresses and few shapes."""

from __future__ import annotations

import numpy as np

from redraft.bundle import LimitsInfo
from redraft.engines.interface import TargetBatch


class RowBuffers:
    """Copies batches into preallocated int32 arrays.

    Sequences are padded to the number of slots (with sequences of no rows) and commit rows to the most that can
    occur, so that only the arrays with a row dimension change shape from step to step.
    """

    def __init__(self, limits: LimitsInfo):
        self._limits = limits
        self.mask_words = -(-limits.max_tree // 32)
        self._most_rows = limits.slots * (limits.max_tree + limits.prefill_chunk)
        self._input_ids = np.zeros(self._most_rows, np.int32)
        self._positions = np.zeros(self._most_rows, np.int32)
        self._tree_mask = np.zeros((self._most_rows, self.mask_words), np.int32)
        self._logit_rows = np.zeros(self._most_rows, np.int32)
        self._row_offsets = np.zeros(limits.slots + 1, np.int32)
        self._commit_offsets = np.zeros(limits.slots + 1, np.int32)
        self._slots = np.zeros(limits.slots, np.int32)
        self._cache_lengths = np.zeros(limits.slots, np.int32)
        self._commit_src = np.zeros(limits.slots * limits.max_tree, np.int32)

    def fill(self, batch: TargetBatch) -> dict[str, np.ndarray]:
        """The network's row inputs by name: views of the buffers with at least one row and one logit row.

        Raises ValueError for a batch outside of the limits.
        """
        rows, sequences = len(batch.input_ids), len(batch.slots)
        commits, logits = len(batch.commit_src), len(batch.logit_rows)
        self._check(batch, rows, sequences, commits, logits)
        self._input_ids[:rows] = batch.input_ids
        self._positions[:rows] = batch.positions
        self._tree_mask[:rows] = batch.tree_mask
        self._logit_rows[:logits] = batch.logit_rows
        self._row_offsets[: sequences + 1] = batch.row_offsets
        self._row_offsets[sequences + 1 :] = rows
        self._commit_offsets[: sequences + 1] = batch.commit_offsets
        self._commit_offsets[sequences + 1 :] = commits
        self._slots[:sequences] = batch.slots
        self._cache_lengths[:sequences] = batch.cache_lengths
        self._cache_lengths[sequences:] = 0
        self._commit_src[:commits] = batch.commit_src
        if not logits:
            self._logit_rows[0] = 0
        return {
            "input_ids": self._input_ids[:rows],
            "positions": self._positions[:rows],
            "row_offsets": self._row_offsets,
            "slots": self._slots,
            "cache_lengths": self._cache_lengths,
            "tree_mask": self._tree_mask[:rows],
            "commit_src": self._commit_src,
            "commit_offsets": self._commit_offsets,
            "logit_rows": self._logit_rows[: max(logits, 1)],
        }

    def _check(self, batch: TargetBatch, rows: int, sequences: int, commits: int, logits: int) -> None:
        if not 1 <= sequences <= self._limits.slots:
            raise ValueError(f"a batch of {sequences} sequences: expected 1 to {self._limits.slots}")
        for what, count in (("rows", rows), ("logit rows", logits)):
            if count > self._most_rows:
                raise ValueError(f"a batch of {count} {what}: expected at most {self._most_rows}")
        if rows < 1 or batch.row_offsets[-1] != rows:
            raise ValueError(f"row_offsets ends at {batch.row_offsets[-1]}: expected the number of rows, {rows}, at least 1")
        if commits > len(self._commit_src):
            raise ValueError(f"a batch with {commits} commit rows: expected at most {len(self._commit_src)}")
        if batch.tree_mask.shape != (rows, self.mask_words):
            raise ValueError(f"tree_mask has shape {batch.tree_mask.shape}: expected {(rows, self.mask_words)}")
