"""Trees of a whole batch in one call of compiled code each, without the interpreter's lock.

Every function here gives what the Python function that it names gives, bit for bit: that one is the algorithm to read,
and the oracle of the tests.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import accumulate, chain, pairwise
from operator import le
from typing import Any
from weakref import finalize

import numpy as np

from redraft.batch import DraftCandidates
from redraft.decoding.defaults import NGRAM_CHANCES
from redraft.decoding.growth import LEAST, MOST
from redraft.decoding.ngram import LONGEST, MOST_TIMES, NgramIndex
from redraft.decoding.token_tree import UNLIMITED, TokenTree
from redraft.plugins.trees.native import address, call, function, pointer, zeros

LENGTHS = np.array(sorted(NGRAM_CHANCES), np.int64)


def rows_of(chances: Mapping[int, Sequence[float]]) -> np.ndarray:
    """The chances of `NgramScores` as compiled code reads them: float64 [lengths, times], the shortest length first."""
    return np.array([chances[length] for length in LENGTHS.tolist()])


class NativeNgrams(NgramIndex):
    """`NgramIndex` in compiled code. What is not read yet is handed over with the next draft of the batch."""

    def __init__(
        self,
        tokens: Iterable[int] = (),
        table: np.ndarray | None = None,
        chances: Mapping[int, Sequence[float]] = NGRAM_CHANCES,
    ):
        super().__init__(tokens, table, chances)
        self.handle: int = function("ngrams_new")(pointer(LENGTHS, np.int64), len(LENGTHS))
        if not self.handle:
            raise MemoryError("no memory for a sequence's n-grams")
        # At exit other threads may be in a step still: the memory goes with the process.
        finalize(self, function("ngrams_free"), self.handle).atexit = False

    @property
    def tail(self) -> tuple[int, ...]:
        """The last tokens of the history, as many as can be matched."""
        read([self])
        tokens = np.empty(LONGEST, np.int32)
        count = function("ngrams_tail")(self.handle, pointer(tokens, np.int32))
        return tuple(tokens[:count].tolist())

    def _read(self) -> None:
        read([self])
        self._tail = self.tail

    def match(self, tail: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Return what `NgramIndex.match` does."""
        read([self])
        tokens, result = np.array(tail, np.int32), np.empty(2, np.int32)
        arrays = pointer(tokens, np.int32), len(tokens), pointer(result, np.int32)
        index = function("ngrams_match")(self.handle, *arrays)
        token, times = result.tolist()
        return None if index < 0 else (token, int(LENGTHS[index]), min(times, MOST_TIMES))


def read(indices: Sequence[NativeNgrams]) -> array:
    """Let n-grams read what they were told. Returns their handles [B]."""
    handles, unread = array("q", [index.handle for index in indices]), [index.unread for index in indices]
    if tokens := array("i", chain.from_iterable(unread)):
        ends = array("q", accumulate(map(len, unread)))
        call("ngrams_read", address(handles), len(handles), address(tokens), address(ends))
        for part in unread:
            part.clear()
    return handles


def grow_trees(
    drafts: DraftCandidates,
    roots: np.ndarray,
    budget: int,
    indices: Sequence[NativeNgrams],
    odds: Sequence[float],
    joint: tuple[float, float],
    chances: np.ndarray,
) -> TokenTree:
    """Do as `redraft.decoding.growth.grow_trees` for sequences without a grammar. `chances` are those of `indices`: see
    `rows_of`."""
    _expect(len(roots), indices, odds)
    handles, factors = read(indices), array("d", odds)
    room = _room(len(roots), len(roots) * (budget + 1))
    call(
        "trees_grow",
        *_candidates(drafts, roots),
        budget,
        *(address(handles), address(factors), pointer(chances, np.float64), MOST_TIMES, LEAST, MOST, *joint),
        *room.addresses,
    )
    return _written(room)


def best_first(drafts: DraftCandidates, roots: np.ndarray, budget: int) -> TokenTree:
    """Do as `redraft.decoding.construction.best_first`. Raises ValueError where a candidate lacks its parent."""
    room = _room(len(roots), len(roots) * (min(budget, drafts.candidates[0].size) + 1))
    call("trees_best_first", *_candidates(drafts, roots), budget, *room.addresses)
    return _written(room)


def prune_tree(
    tree: TokenTree,
    budgets: Sequence[int],
    max_depths: Sequence[int] | None = None,
    least: Sequence[float] | None = None,
) -> TokenTree:
    """Do as `redraft.decoding.token_tree.prune_tree` for trees without draws."""
    count = len(tree)
    depths, scores = max_depths or [UNLIMITED] * count, least or [-math.inf] * count
    _expect(count, budgets, depths, scores)
    drafted = (tree.sizes - 1).tolist()
    if max(scores) == -math.inf and all(map(le, drafted, map(min, budgets, depths))):
        return tree
    room, cut = _room(count, len(tree.tokens)), zeros("q", 1)
    limits = array("i", budgets), array("i", depths), array("d", scores)
    call("trees_cut", count, *tree.addresses, *(address(limit) for limit in limits), *room.addresses, address(cut))
    return _written(room) if cut[0] else tree


def shared_budgets(tree: TokenTree, total: int) -> list[int]:
    """Do as `redraft.decoding.token_tree.shared_budgets`."""
    if total >= len(tree.tokens) - len(tree):
        return (tree.sizes - 1).tolist()
    counts = zeros("i", len(tree))
    offsets, _, _, scores = tree.addresses
    call("trees_share", len(counts), offsets, scores, total, address(counts))
    return counts.tolist()


def pack_trees(tree: TokenTree, starts: np.ndarray, words: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's position, int32 [T], and mask, int32 [T, words], of trees whose roots stand at `starts` int32
    [B]: by a node's depth in `TokenTree.ancestors`, and its set of bits there as `mask_words`.

    Raises ValueError if a tree has a node that the words do not hold.
    """
    _expect(len(tree), starts)
    rows = len(tree.tokens)
    if rows == len(tree) and words:  # nothing is drafted
        masks = np.zeros((rows, words), np.int32)
        masks[:, 0] = 1
        return starts.copy(), masks
    positions, masks = np.empty(rows, np.int32), np.empty((rows, words), np.int32)
    offsets, _, parents, _ = tree.addresses
    arrays = pointer(positions, np.int32), pointer(masks, np.int32)
    call("trees_pack", len(starts), offsets, parents, pointer(starts, np.int32), words, *arrays)
    return positions, masks


def walk_trees(
    tree: TokenTree, chosen: np.ndarray, end_ids: Sequence[frozenset[int]]
) -> list[tuple[list[int], list[int]]]:
    """Return path and tokens of each verdict of `redraft.decoding.verification.walk`, where `chosen` int32 [T] are what
    plain samplers with these end tokens choose at the nodes."""
    _expect(len(tree), end_ids)
    _expect(len(tree.tokens), chosen)
    if len(chosen) == len(tree):  # nothing is drafted
        return [([0], [token]) for token in chosen.tolist()]
    ends = array("i", chain.from_iterable(end_ids))
    end_offsets = array("i", [0, *accumulate(map(len, end_ids))])
    # Paths are at most as long as the trees are large. The tokens stand behind them.
    offsets, walked = zeros("i", len(end_offsets)), zeros("i", 2 * len(chosen))
    call(
        "trees_walk",
        *(len(end_ids), *tree.addresses[:3], pointer(chosen, np.int32)),
        *(address(ends), address(end_offsets), address(offsets), address(walked)),
    )
    paths, tokens = walked[: len(chosen)].tolist(), walked[len(chosen) :].tolist()
    return [(paths[start:end], tokens[start:end]) for start, end in pairwise(offsets)]


def _room(count: int, nodes: int) -> TokenTree:
    """Return room for `count` trees of up to `nodes` nodes in all: compiled code does not look whether there is."""
    tokens, parents, scores = np.empty(nodes, np.int32), np.empty(nodes, np.int32), np.empty(nodes)
    return TokenTree(np.empty(count + 1, np.int32), tokens, parents, scores)


def _written(room: TokenTree) -> TokenTree:
    """Return the trees that were written to such room."""
    end = room.offsets[-1]
    tree = TokenTree(room.offsets, room.tokens[:end], room.parents[:end], room.scores[:end])
    tree.addresses = room.addresses
    return tree


def _candidates(drafts: DraftCandidates, roots: np.ndarray) -> tuple[Any, ...]:
    shape = drafts.candidates.shape
    if (len(roots), *drafts.log_probs.shape, *drafts.parents.shape) != (shape[0], *shape, *shape[:3]):
        raise ValueError(
            f"candidates {shape} with log-probabilities {drafts.log_probs.shape}, parents "
            f"{drafts.parents.shape} and {len(roots)} roots: expected arrays of one search"
        )
    tokens, parents, roots = (
        np.ascontiguousarray(array, np.int32) for array in (drafts.candidates, drafts.parents, roots)
    )
    log_probs = np.ascontiguousarray(drafts.log_probs, np.float32)
    arrays = pointer(tokens, np.int32), pointer(log_probs, np.float32), pointer(parents, np.int32)
    return *arrays, *shape[1:], pointer(roots, np.int32), len(roots)


def _expect(count: int, *columns: Sized) -> None:
    """Raise ValueError unless each column has `count` entries: compiled code would read past its end."""
    if {*map(len, columns)} != {count}:
        raise ValueError(f"expected {count} entries each, got {', '.join(str(len(column)) for column in columns)}")
