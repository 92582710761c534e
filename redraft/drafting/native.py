"""Trees from a drafter's candidates to the nodes that are verified, in one call of compiled code without the
interpreter's lock.

Every function here gives what the Python functions that it names give, bit for bit: those are the algorithms to read,
and the oracle of the tests.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from redraft.batch import DraftCandidates
from redraft.budgets.choice import Choice, Terms
from redraft.decoding.growth import MOST
from redraft.decoding.native import LENGTHS, NativeNgrams, NativeTextStore, expect, signed, take_unread
from redraft.decoding.ngram import LEAST, MOST_TIMES
from redraft.decoding.token_tree import TokenTree
from redraft.drafting.cutting import TreeLimits
from redraft.plugins.trees.native import address, call, pointer, zeros

NO_TERMS: tuple[Any, ...] = (None, 0.0, False, None, None, 0, False, 0, 0.0, 0.0)
NO_CUT: tuple[Any, ...] = (None, None, None, 0, *NO_TERMS, None, None)
NO_NGRAMS: tuple[Any, ...] = (None, None, None, None, None, None, None, 0, 0.0, 0.0, 0.0, 0.0)


class Growth:
    """What n-grams join a drafter's candidates by: the factors of `redraft.decoding.growth.joint_odds`, and the chances
    of `redraft.decoding.scores.NgramScores`."""

    def __init__(self, joint: tuple[float, float], chances: Mapping[int, Sequence[float]]):
        table = np.array([chances[length] for length in LENGTHS.tolist()])
        self.arguments = pointer(table, np.float64), MOST_TIMES, LEAST, MOST, *joint


class Ngrams:
    """The n-grams of a batch's sequences, what the odds of their guesses are multiplied by, and how they join."""

    def __init__(self, indices: Sequence[NativeNgrams], odds: Sequence[float], growth: Growth):
        expect(len(indices), odds)
        self.indices = indices
        self.handles = address(array("q", [index.handle for index in indices]))
        # A worker has one store; scope 0 is of a sequence without it.
        texts = next((index.texts.handle for index in indices if isinstance(index.texts, NativeTextStore)), None)
        scopes = address(array("q", [signed(index.scope) for index in indices]))
        self.rules = address(array("d", odds)), texts, scopes, *growth.arguments

    def arguments(self) -> tuple[Any, ...]:
        """What compiled code takes, with the tokens that they were told and have not read: these count as read."""
        tokens, ends = take_unread(self.indices)
        return self.handles, address(tokens), address(ends), *self.rules


def draft_trees(
    drafts: DraftCandidates,
    roots: np.ndarray,
    budget: int,
    ngrams: Ngrams | None = None,
    limits: TreeLimits | None = None,
    terms: Terms | None = None,
) -> tuple[TokenTree, Choice | None]:
    """Do as `redraft.decoding.growth.grow_trees` for sequences without a grammar or, without n-grams, as
    `redraft.decoding.construction.best_first`, and then, within limits, as `redraft.drafting.cutting.cut_trees`.

    Raises ValueError where a candidate lacks its parent.
    """
    count, grown = len(roots), NO_NGRAMS
    if ngrams:
        expect(count, ngrams.indices)
        grown = ngrams.arguments()
    largest = budget if ngrams else min(budget, drafts.candidates[0].size)
    arguments = *_candidates(drafts, roots), budget, *grown
    return _written("trees_draft", count, count * (largest + 1), limits, terms, *arguments)


def cut_trees(tree: TokenTree, limits: TreeLimits, terms: Terms | None) -> tuple[TokenTree, Choice | None]:
    """Do as `redraft.drafting.cutting.cut_trees` for trees without draws."""
    return _written("trees_cut", len(tree), len(tree.tokens), limits, terms, len(tree), *tree.addresses)


def _written(
    name: str, count: int, nodes: int, limits: TreeLimits | None, terms: Terms | None, *arguments: Any
) -> tuple[TokenTree, Choice | None]:
    """Call a function that writes `count` trees of up to `nodes` nodes in all: compiled code does not look for room."""
    counts, chosen, promises = zeros("i", count), zeros("d", 3), zeros("d", count)
    cut = _cut(count, limits, terms, address(counts), address(chosen)) if limits else NO_CUT
    room = TokenTree(
        np.empty(count + 1, np.int32), np.empty(nodes, np.int32), np.empty(nodes, np.int32), np.empty(nodes)
    )
    call(name, *arguments, *cut, *room.addresses, address(promises))
    end = room.offsets[-1]
    tree = TokenTree(room.offsets, room.tokens[:end], room.parents[:end], room.scores[:end])
    tree.addresses, tree.promises = room.addresses, promises.tolist()
    return tree, Choice(counts.tolist(), *chosen) if terms else None


def _cut(count: int, limits: TreeLimits, terms: Terms | None, *results: Any) -> tuple[Any, ...]:
    nodes = limits.nodes if terms else [limits.most] * count
    expect(count, nodes, limits.depths, limits.scores, terms.ratios if terms else nodes)
    bounds = address(array("i", nodes)), address(array("i", limits.depths)), address(array("d", limits.scores))
    return *bounds, sum(limits.nodes), *(_terms(terms) if terms else NO_TERMS), *results


def _terms(terms: Terms) -> tuple[Any, ...]:
    times, table = terms.times, terms.times.table
    ratios, rows, seconds = array("d", terms.ratios), array("q", table.rows), array("d", table.seconds)
    known = address(rows), address(seconds), len(rows), table.padded
    return address(ratios), terms.tokens, terms.probes, *known, times.rows, times.factor, times.more_s


def _candidates(drafts: DraftCandidates, roots: np.ndarray) -> tuple[Any, ...]:
    shape = drafts.candidates.shape
    if drafts.log_probs.shape != shape or drafts.parents.shape != shape[:3] or len(roots) != shape[0]:
        raise ValueError(
            f"candidates {shape} with log-probabilities {drafts.log_probs.shape}, parents "
            f"{drafts.parents.shape} and {len(roots)} roots: expected arrays of one search"
        )
    tokens = pointer(np.ascontiguousarray(drafts.candidates, np.int32), np.int32)
    log_probs = pointer(np.ascontiguousarray(drafts.log_probs, np.float32), np.float32)
    parents = pointer(np.ascontiguousarray(drafts.parents, np.int32), np.int32)
    return tokens, log_probs, parents, *shape[1:], pointer(roots, np.int32), len(roots)
