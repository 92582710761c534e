"""A target whose logits are a hash of the visible token path, with a real cache: every cache mistake changes the text.

Per slot the cache stores (token, position) of each row. The logits of a row depend on all tokens that it sees, in the
order of their positions, which must be 0, 1, 2, ...; commits move rows as the contract says.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from redraft.batch import DraftBatch, DraftCandidates, TargetBatch
from redraft.text import TextCodec

TOY = "toy"
_PRIME = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class ToyEngine:
    """Target and drafter in one; its only method is called TOY."""

    reads_context = reads_text = False
    overlaps = False
    reuse_refusal = None
    step_shapes = ()

    @property
    def drafters(self):
        return {TOY: self}

    def __init__(self, vocab_size=111, slots=4, max_len=256, max_tree=32, seed=0, sharpness=3.0, quality=0.7,
                 width=4, length=4, candidates=6):  # fmt: skip
        self.vocab_size, self.sharpness, self.quality, self.seed = vocab_size, sharpness, quality, seed
        self.width, self.length, self.candidates = width, length, candidates
        self.cache = np.full((slots, max_len + max_tree, 2), -1, dtype=np.int64)
        self.max_len = max_len
        self.rows_per_step: list[int] = []
        self.prefill_rows_per_step: list[int] = []
        self.draft_calls = 0

    def logits_after(self, state: int) -> np.ndarray:
        """Logits float32 [V] after the path whose hash is `state`, to be read only."""
        return _logits(state, self.vocab_size, self.sharpness)

    def path_state(self, tokens) -> int:
        """32-bit hash of a path."""
        state = self.seed
        for token in tokens:
            state = _mix(state, int(token))
        return state

    def execute(self, batch: TargetBatch, samplers=None, meanwhile=None):
        for array in vars(batch).values():
            assert array.dtype == np.int32
        states = []
        for b in range(len(batch.slots)):
            states += self._sequence(batch, b)
        self.rows_per_step.append(len(batch.input_ids))
        self.prefill_rows_per_step.append(int((batch.tree_mask == 0).all(axis=1).sum()))
        hidden = np.array([[s >> 16, s & 0xFFFF] for s in states], dtype=np.float32)
        logits = np.empty((len(batch.logit_rows), self.vocab_size), dtype=np.float32)
        for place, row in enumerate(batch.logit_rows):
            logits[place] = self.logits_after(states[row])
        return logits, hidden

    def _sequence(self, batch: TargetBatch, b: int) -> list[int]:
        slot, length = int(batch.slots[b]), int(batch.cache_lengths[b])
        start, end = batch.row_offsets[b : b + 2].tolist()
        commit = batch.commit_src[batch.commit_offsets[b] : batch.commit_offsets[b + 1]].tolist()
        assert commit == sorted(set(commit))
        rows = self.cache[slot]
        previous = length - len(commit)
        for place, source in enumerate(commit):
            rows[previous + place] = rows[previous + source]
        rows[length:] = -1
        assert (rows[:length, 1] == np.arange(length)).all(), f"cache of slot {slot} is not positions 0..{length - 1}"
        count = end - start
        before, tokens = rows[:length, 0].tolist(), batch.input_ids[start:end].tolist()
        positions = batch.positions[start:end].tolist()
        rows[length : length + count] = np.stack([tokens, positions], axis=1)
        states = []
        for local, words in enumerate(batch.tree_mask[start:end].view(np.uint32).tolist()):
            if any(words):
                visible = [j for j in range(count) if j == local or words[j // 32] >> j % 32 & 1]
                assert visible[-1] == local
            else:
                visible = list(range(local + 1))
            seen = [positions[j] for j in visible]
            assert seen == list(range(length, length + len(visible))), "visible rows are not one path"
            states.append(self.path_state([*before, *(tokens[j] for j in visible)]))
        return states

    def draft(self, batch: DraftBatch, noise=None) -> DraftCandidates:
        self.draft_calls += 1
        shape = (len(batch.tokens), self.length, self.width)
        ids = np.zeros((*shape, self.candidates), dtype=np.int32)
        log_probs = np.full(ids.shape, -np.inf, dtype=np.float32)
        parents = np.zeros(shape, dtype=np.int32)
        for b, (high, low) in enumerate(batch.features.astype(np.int64).tolist()):
            state, paths, scores = high << 16 | low, [[int(batch.tokens[b])]], [0.0]
            for level in range(self.length):
                for w, path in enumerate(paths):
                    ids[b, level, w], probs = self._propose(state, path)
                    log_probs[b, level, w] = scores[w] + np.log(probs)
                best = np.argsort(-log_probs[b, level].reshape(-1), kind="stable")[: self.width]
                if level + 1 < self.length:
                    parents[b, level + 1] = best
                scores = log_probs[b, level].reshape(-1)[best].tolist()
                flat_ids = ids[b, level].reshape(-1)
                paths = [[*paths[i // self.candidates], int(flat_ids[i])] for i in best[: len(paths) * self.candidates]]
        return DraftCandidates(ids, log_probs, parents)

    def _propose(self, state: int, path: list[int]):
        for token in path:
            state = _mix(state, token)
        logits = self.logits_after(state)
        rng = np.random.default_rng(state)
        if rng.random() > self.quality:
            logits = rng.permutation(logits)
        ids = np.argsort(-logits, kind="stable")[: self.candidates]
        probs = np.exp(logits[ids] - logits.max())
        return ids, probs / np.exp(logits - logits.max()).sum()

    def copy(self, source: int, target: int, rows: int) -> None:
        assert source != target
        self.cache[target, :rows] = self.cache[source, :rows]

    def close(self) -> None:
        pass


@lru_cache(maxsize=2**15)
def _logits(state: int, vocab_size: int, sharpness: float) -> np.ndarray:
    """Kept, as tests compare many runs that see the same paths."""
    with np.errstate(over="ignore"):
        x = (np.arange(vocab_size, dtype=np.uint64) + np.uint64(state)) * np.uint64(_PRIME)
        x ^= x >> np.uint64(29)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(32)
    logits = (sharpness * (x.astype(np.float64) / 2**63 - 1) * 2).astype(np.float32)
    logits.flags.writeable = False
    return logits


def _mix(state: int, token: int) -> int:
    mixed = ((state ^ (token + 1)) * _PRIME + 0x1234567) & _MASK
    return (mixed ^ mixed >> 31) & 0xFFFFFFFF


def only(plan) -> dict:
    """A plan as the toy engine's method; none for None."""
    return {} if plan is None else {TOY: plan}


def toy_codec(vocab_size=111) -> TextCodec:
    return TextCodec(toy_tokenizer(vocab_size))


def toy_tokenizer(vocab_size=111) -> Tokenizer:
    """A byte-level tokenizer whose tokens are the printable ASCII characters, some pairs, and raw UTF-8 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ascii_tokens = [c for c in alphabet if ord(c) < 128 or c == "Ġ"]
    names = ["<end>", *ascii_tokens, *[c for c in alphabet if c not in ascii_tokens]][:vocab_size]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer
