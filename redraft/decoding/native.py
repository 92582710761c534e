"""Trees of a whole batch in one call of compiled code each, without the interpreter's lock.

Every function here gives what the Python function that it names gives, bit for bit: that one is the algorithm to read,
and the oracle of the tests.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, cast
from weakref import finalize

import numpy as np

from redraft.decoding import text_store
from redraft.decoding.defaults import NGRAM_CHANCES, TEXT_CHANCES
from redraft.decoding.ngram import MOST_TIMES, NgramIndex
from redraft.decoding.sampling import Sampler
from redraft.decoding.text_store import LONGEST, TextMatch, TextStore
from redraft.decoding.token_tree import TokenTree
from redraft.plugins.kernels import library
from redraft.plugins.trees.native import address, call, function, pointer, zeros

LENGTHS = np.array(sorted(NGRAM_CHANCES), np.int64)


class NativeTextStore(TextStore):
    """`TextStore` in compiled code."""

    def __init__(self, capacity: int, seed: int, chances: Mapping[int, Sequence[float]] = TEXT_CHANCES):
        self.capacity, self.seed, self.chances = capacity, seed, chances
        lengths = np.array(sorted(chances), np.int64)
        table = np.array([chances[length] for length in lengths.tolist()])
        numbers = pointer(lengths, np.int64), len(lengths), pointer(table, np.float64), table.shape[1]
        rules = *text_store.STARTS, text_store.TRIES, text_store.MOST_SEEN, text_store.WEIGHT
        self.handle: int = function("texts_new")(capacity, signed(seed), *numbers, *rules)
        if not self.handle:
            raise MemoryError(f"no memory for {capacity} tokens of texts")
        finalize(self, function("texts_free"), self.handle).atexit = False  # as for n-grams

    @property
    def counts(self) -> tuple[int, int, int]:
        """See `TextStore.counts`."""
        counts = np.empty(3, np.int64)
        function("texts_counts")(self.handle, pointer(counts, np.int64))
        tokens, guesses, right = counts.tolist()
        return tokens, guesses, right

    def begin(self, scope: int) -> None:
        """See `TextStore.begin`."""
        function("texts_begin")(self.handle, signed(scope))

    def extend(self, tokens: Iterable[int]) -> None:
        """See `TextStore.extend`."""
        array = np.fromiter(tokens, np.int32) if not isinstance(tokens, np.ndarray) else tokens
        call("texts_read", self.handle, pointer(array, np.int32), len(array))

    def match(self, scope: int, tail: tuple[int, ...], least: int = 1) -> TextMatch | None:
        """See `TextStore.match`."""
        return self._match(scope, tail, least)[0]

    def guess(self, scope: int, tail: tuple[int, ...], least: int = 1) -> tuple[int, float] | None:
        """See `TextStore.guess`."""
        match, chance = self._match(scope, tail, least)
        return (match.token, chance) if match else None

    def _match(self, scope: int, tail: tuple[int, ...], least: int) -> tuple[TextMatch | None, float]:
        tokens, numbers, chance = np.array(tail, np.int32), np.empty(2, np.int64), np.zeros(1)
        results = pointer(numbers, np.int64), pointer(chance, np.float64)
        arrays = pointer(tokens, np.int32), len(tokens), least, *results
        token = function("texts_match")(self.handle, signed(scope), *arrays)
        return (None if token < 0 else TextMatch(token, *numbers.tolist())), float(chance[0])

    def texts(self) -> tuple[np.ndarray, np.ndarray]:
        """All texts, the oldest first: tokens int32 [n], with -1 between texts, and their scopes int64 [n]."""
        tokens, scopes = np.empty(self.capacity, np.int32), np.empty(self.capacity, np.int64)
        count = function("texts_write")(self.handle, pointer(tokens, np.int32), pointer(scopes, np.int64))
        return tokens[:count], scopes[:count]


def signed(number: int) -> int:
    """64 bits as compiled code takes them."""
    return number - (1 << 64) if number >> 63 else number


class NativeNgrams(NgramIndex):
    """`NgramIndex` in compiled code. What is not read yet is handed over with the next draft of the batch."""

    def __init__(
        self,
        tokens: Iterable[int] = (),
        table: np.ndarray | None = None,
        chances: Mapping[int, Sequence[float]] = NGRAM_CHANCES,
        texts: NativeTextStore | None = None,
        scope: int = 0,
        least: int = 1,
    ):
        super().__init__(tokens, table, chances, texts, scope, least)
        self.handle: int = function("ngrams_new")(pointer(LENGTHS, np.int64), len(LENGTHS), least)
        if not self.handle:
            raise MemoryError("no memory for a sequence's n-grams")
        # At exit other threads may be in a step still: the memory goes with the process.
        finalize(self, function("ngrams_free"), self.handle).atexit = False

    @property
    def tail(self) -> tuple[int, ...]:
        """The last tokens of the history, as many as can be matched."""
        read([self])
        tokens = np.empty(LONGEST, np.int32)
        count = function("ngrams_tail")(self.handle, LONGEST, pointer(tokens, np.int32))
        return tuple(tokens[:count].tolist())

    def expect(self) -> None:
        """See `NgramIndex.expect`."""
        read([self])
        if isinstance(self.texts, NativeTextStore):
            function("texts_expect")(self.texts.handle, signed(self.scope), self.handle)

    def read(self) -> None:
        """See `NgramIndex.read`."""
        read([self])

    def match(self, tail: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Return what `NgramIndex.match` does."""
        read([self])
        tokens, result = np.array(tail, np.int32), np.empty(2, np.int32)
        arrays = pointer(tokens, np.int32), len(tokens), pointer(result, np.int32)
        index = function("ngrams_match")(self.handle, *arrays)
        token, times = result.tolist()
        return None if index < 0 else (token, int(LENGTHS[index]), min(times, MOST_TIMES))


def read(indices: Sequence[NativeNgrams]) -> None:
    """Let n-grams read what they were told."""
    handles, (tokens, ends) = array("q", [index.handle for index in indices]), take_unread(indices)
    call("ngrams_read", address(handles), len(handles), address(tokens), address(ends))


def take_unread(indices: Sequence[NativeNgrams]) -> tuple[array, array]:
    """Take from n-grams what they were told and have not read: tokens back to back, and the end of each one's [B]."""
    tokens, ends = array("i"), array("q")
    for index in indices:
        tokens.extend(index.unread)
        index.unread.clear()
        ends.append(len(tokens))
    return tokens, ends


class Walkers:
    """Plain samplers of a batch, without grammars, as compiled code takes them."""

    def __init__(self, samplers: Sequence[Sampler]):
        self.samplers = samplers
        self._greedy = all(sampler.greedy for sampler in samplers)
        ids = [sampler.end_ids for sampler in samplers]
        self.ends = address(array("i", chain.from_iterable(ids)))
        self.end_offsets = address(array("i", [0, *accumulate(map(len, ids))]))

    @cached_property
    def draws(self) -> ctypes.Array:
        """What chooses their tokens; null: the largest logit does."""
        return address(array("q", [0 if sampler.greedy else sampler.draws.address for sampler in self.samplers]))

    def choose(self, logits: np.ndarray) -> list[int]:
        """What each chooses of its own logits float32 [B, V], at its position."""
        if self._greedy:
            return cast(list[int], logits.argmax(axis=1).tolist())
        return [sampler.choose(own) for sampler, own in zip(self.samplers, logits, strict=True)]


def walk_trees(tree: TokenTree, logits: np.ndarray, walkers: Walkers) -> list[tuple[list[int], list[int]]]:
    """Return path and tokens of each verdict of `redraft.decoding.verification.walk`, where `logits` are float32
    [T, V], or int32 [T] what the samplers choose at the nodes."""
    count, rows = len(tree), len(tree.tokens)
    expect(count, walkers.samplers)
    expect(rows, logits)
    if rows == count:  # nothing is drafted
        return [([0], [token]) for token in (logits.tolist() if logits.ndim == 1 else walkers.choose(logits))]
    if logits.ndim == 1:
        chooser: tuple[Any, ...] = pointer(logits, np.int32), None, 0, None, None, None
    else:
        positions = array("q", [sampler.position for sampler in walkers.samplers])
        rules = walkers.draws, address(positions), library().redraft_choose
        chooser = None, pointer(logits, np.float32), logits.shape[1], *rules
    offsets, walked = zeros("i", count + 1), zeros("i", 2 * rows)
    ends = walkers.ends, walkers.end_offsets
    call("trees_walk", count, *tree.addresses[:3], *chooser, *ends, address(offsets), address(walked))
    # Paths are at most as long as the trees are large. The tokens stand behind them.
    paths, tokens = walked[:rows].tolist(), walked[rows:].tolist()
    return [(paths[start:end], tokens[start:end]) for start, end in pairwise(offsets)]


def expect(count: int, *columns: Sized) -> None:
    """Raise ValueError unless each column has `count` entries: compiled code would read past its end."""
    for column in columns:
        if len(column) != count:
            raise ValueError(f"expected {count} entries each, got {', '.join(str(len(column)) for column in columns)}")
