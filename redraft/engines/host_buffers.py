"""Host buffers for a step's inputs: an engine sees the same addresses in every step, and few shapes."""

from __future__ import annotations

import numpy as np

from redraft.batch import DraftBatch, DraftSampling, SharedNoise, TargetBatch
from redraft.bundle.config import LimitsInfo, TargetInfo
from redraft.bundle.method import MethodConfig
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS, DrawShape
from redraft.decoding.token_tree import mask_width
from redraft.engines.features import on_host


class RowBuffers:
    """Copies batches into preallocated int32 arrays.

    Sequences are padded to the number of slots (with sequences of no rows) and commit rows to the most that can
    occur, so that only the arrays with a row dimension change shape from step to step.
    """

    def __init__(self, limits: LimitsInfo, vocab_size: int):
        self._limits, self._vocab_size = limits, vocab_size
        self._cache_rows = limits.max_len + limits.max_tree
        self.mask_words = mask_width(limits.max_tree)
        self.most_rows = limits.slots * (limits.max_tree + limits.prefill_chunk)
        self._input_ids = np.zeros(self.most_rows, np.int32)
        self._positions = np.zeros(self.most_rows, np.int32)
        self._tree_mask = np.zeros((self.most_rows, self.mask_words), np.int32)
        self._logit_rows = np.zeros(self.most_rows, np.int32)
        self._row_offsets = np.zeros(limits.slots + 1, np.int32)
        self._commit_offsets = np.zeros(limits.slots + 1, np.int32)
        self._slots = np.zeros(limits.slots, np.int32)
        self._cache_lengths = np.zeros(limits.slots, np.int32)
        self._commit_src = np.zeros(limits.slots * limits.max_tree, np.int32)

    def fill(self, batch: TargetBatch) -> dict[str, np.ndarray]:
        """The network's row inputs by name: views of the buffers with at least one row and one logit row.

        Raises ValueError for a batch whose arrays do not fit; `check` looks at their values too.
        """
        rows, logits = len(batch.input_ids), len(batch.logit_rows)
        try:
            self._copy(batch, rows, logits)
        except ValueError:
            self.check(batch)
            raise
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

    def _copy(self, batch: TargetBatch, rows: int, logits: int) -> None:
        sequences, commits = len(batch.slots), len(batch.commit_src)
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

    def check(self, batch: TargetBatch) -> None:
        """Raise ValueError for the first value outside the limits; the operators check again."""
        rows, sequences = len(batch.input_ids), len(batch.slots)
        commits, logits = len(batch.commit_src), len(batch.logit_rows)
        _expect(1 <= sequences <= self._limits.slots, "number of sequences", sequences, f"1 to {self._limits.slots}")
        _expect(1 <= rows <= self.most_rows, "number of rows", rows, f"1 to {self.most_rows}")
        _expect(logits <= self.most_rows, "number of logit rows", logits, f"at most {self.most_rows}")
        _expect(commits <= len(self._commit_src), "number of commit rows", commits, f"at most {len(self._commit_src)}")
        shape = (rows, self.mask_words)
        _expect(batch.tree_mask.shape == shape, "shape of tree_mask", batch.tree_mask.shape, shape)
        _expect(
            batch.row_offsets[-1] == rows, "end of row_offsets", batch.row_offsets[-1], f"{rows}, the number of rows"
        )
        _expect(batch.commit_offsets[-1] == commits, "end of commit_offsets", batch.commit_offsets[-1], commits)
        _expect_below("input_ids", batch.input_ids, self._vocab_size)
        _expect_below("positions", batch.positions, self._cache_rows)
        _expect_below("slots", batch.slots, self._limits.slots)
        _expect_below("logit_rows", batch.logit_rows, rows)
        counts, window_rows = np.diff(batch.row_offsets), self._limits.window_rows
        _expect_below("cache_lengths with rows", batch.cache_lengths + counts - 1, self._cache_rows)
        if window_rows:  # which hold a window before a step's first row, and the step's
            _expect_below("rows of a sequence", counts, window_rows - self._limits.window + 2)
        _expect_below(
            "cache_lengths after commits", batch.cache_lengths - np.diff(batch.commit_offsets), self._cache_rows
        )


class PairBuffers:
    """Copies the pairs that sequences draft from into preallocated arrays; memory is taken as rows are first used."""

    def __init__(self, limits: LimitsInfo, target: TargetInfo, reads_context: bool):
        self._limits, self._reads_context = limits, reads_context
        self.most_pairs = limits.slots * (limits.max_len if reads_context else 1)
        self._features = np.zeros((self.most_pairs, target.feature_size), np.float32)
        self._tokens = np.zeros(self.most_pairs, np.int32)
        self._row_offsets = np.zeros(limits.slots + 1, np.int32)
        self._slots = np.zeros(limits.slots, np.int32)
        self._cache_lengths = np.zeros(limits.slots, np.int32)

    def check(self, batch: DraftBatch) -> None:
        """Raise ValueError for a batch that does not fit."""
        pairs, count, slots = len(batch.tokens), len(batch.slots), self._limits.slots
        unequal = len(batch.features) != pairs or not (self._reads_context or pairs == count)
        if unequal or not 1 <= count <= slots or pairs > self.most_pairs:
            each = "as many of both" if self._reads_context else "one of each"
            sizes = f"{len(batch.features)} rows of features, {pairs} tokens, {count} slots"
            raise ValueError(f"{sizes}: expected {each} for 1 to {slots}")
        if self._reads_context and len(set(batch.slots.tolist())) < count:
            raise ValueError(f"slots are {batch.slots.tolist()}: expected one of its own for every sequence")

    def fill(self, batch: DraftBatch) -> dict[str, np.ndarray]:
        """The network's inputs by name: views of the buffers. `check` tells whether a batch fits."""
        pairs, count = len(batch.tokens), len(batch.slots)
        self._features[:pairs], self._tokens[:pairs] = on_host(batch.features), batch.tokens
        inputs = {"features": self._features[:pairs], "tokens": self._tokens[:pairs]}
        if not self._reads_context:
            return inputs
        self._row_offsets[: count + 1], self._slots[:count] = batch.row_offsets, batch.slots
        self._cache_lengths[:count] = batch.cache_lengths
        rows = {"row_offsets": self._row_offsets[: count + 1], "slots": self._slots[:count]}
        return inputs | rows | {"cache_lengths": self._cache_lengths[:count]}


class ChainBuffers:
    """Copies the rest of each chain into a preallocated array."""

    def __init__(self, slots: int, levels: int):
        self._slots, self._levels = slots, levels
        self._sequences = np.arange(slots, dtype=np.int32)
        self._roots = np.zeros(slots, np.int32)
        self._logits: np.ndarray | None = None

    def fill(self, chains: list[np.ndarray], roots: np.ndarray) -> dict[str, np.ndarray]:
        """The network's inputs by name: views of the buffers. Raises ValueError for chains that do not fit."""
        count, longest = len(chains), max(map(len, chains), default=0)
        if not 1 <= count == len(roots) <= self._slots or longest > self._levels:
            raise ValueError(
                f"{count} chains of up to {longest} levels, {len(roots)} roots: expected one of each for 1 to "
                f"{self._slots}, of up to {self._levels} levels"
            )
        if self._logits is None:
            self._logits = np.zeros((self._slots, self._levels, chains[0].shape[1]), np.float32)
        for rows, chain in zip(self._logits, chains, strict=False):
            rows[: len(chain)] = chain
        self._roots[:count] = roots
        logits = self._logits[:count].reshape(count * self._levels, -1)
        return {"raw_logits": logits, "sequences": self._sequences[:count], "tokens": self._roots[:count]}


class SamplingBuffers:
    """Copies the sampling inputs of random draws into preallocated arrays."""

    NAMES = ("noise", "temperature", "top_k", "top_p")

    def __init__(self, slots: int, shape: DrawShape, support: int):
        self._buffers = {
            "noise": np.zeros((slots, sum(shape.noise_rows), support), np.float32),
            "temperature": np.zeros(slots, np.float32),
            "top_k": np.zeros(slots, np.int32),
            "top_p": np.zeros(slots, np.float32),
        }

    @classmethod
    def of(cls, method: MethodConfig, slots: int) -> SamplingBuffers | None:
        """The buffers of a method's drafter; None where it does not draw at random."""
        random = RANDOM_CONSTRUCTIONS.get(method.construction or "")
        return cls(slots, random.shape(method.levels), method.support) if random else None

    def fill(self, sampling: DraftSampling, count: int) -> dict[str, np.ndarray]:
        """The network's inputs by name for `count` sequences: views of the buffers. Raises ValueError for others."""
        for name, buffer in self._buffers.items():
            values, expected = getattr(sampling, name), (count, *buffer.shape[1:])
            _expect(values.shape == expected, f"shape of {name}", values.shape, expected)
            buffer[:count] = values
        return self.views(count)

    def views(self, count: int) -> dict[str, np.ndarray]:
        """The buffers' first `count` sequences by name."""
        return {name: buffer[:count] for name, buffer in self._buffers.items()}


class NoiseBuffers:
    """Copies what is known of the target's noise into preallocated arrays."""

    NAMES = ("seeds", "positions", "temperature", "top_k", "top_p", "sharpness")

    def __init__(self, slots: int):
        self._seeds = np.zeros(slots, np.uint64)
        self._buffers = {
            "seeds": self._seeds.view(np.int32).reshape(slots, 2),
            "positions": np.zeros(slots, np.int32),
            "temperature": np.zeros(slots, np.float32),
            "top_k": np.zeros(slots, np.int32),
            "top_p": np.zeros(slots, np.float32),
            "sharpness": np.zeros(slots, np.float32),
        }

    @classmethod
    def of(cls, method: MethodConfig, slots: int) -> NoiseBuffers | None:
        """The buffers of a method's drafter; None where it does not take the noise."""
        return cls(slots) if method.shares_noise else None

    def fill(self, noise: SharedNoise | None, count: int) -> dict[str, np.ndarray]:
        """The network's inputs by name for `count` sequences: views of the buffers; None: all are greedy. Raises
        ValueError for noise of others."""
        values = vars(noise or SharedNoise.none(count))
        for name in self.NAMES:
            array = values[name]
            _expect(array.shape == (count,), f"shape of {name}", array.shape, (count,))
            buffer = self._seeds if name == "seeds" else self._buffers[name]
            buffer[:count] = array
        return {name: buffer[:count] for name, buffer in self._buffers.items()}


def _expect(holds: bool, what: str, actual: object, expected: object) -> None:
    if not holds:
        raise ValueError(f"{what} is {actual}: expected {expected}")


def _expect_below(what: str, values: np.ndarray, bound: int) -> None:
    if len(values) and values.view(np.uint32).max() >= bound:
        raise ValueError(f"{what} is {values[values.view(np.uint32) >= bound][0]}: expected 0 to {bound - 1}")
