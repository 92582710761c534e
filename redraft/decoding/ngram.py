"""Drafting without a model: what followed the same words before, in the prompt and in the answer so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from redraft.decoding.token_tree import TokenTree

TRIGRAM_PRIOR, BIGRAM_PRIOR, TABLE_PRIOR = 0.6, 0.4, 0.25
"""Estimated chance that a token is right: its last two or three predecessors seen before, or the table's guess."""


class NgramIndex:
    """What followed each pair and triple of tokens of one sequence most recently; O(1) per new token."""

    def __init__(self, tokens: Iterable[int] = (), table: np.ndarray | None = None):
        """`table`: int32 [V], the usual successor of each token, -1 where there is none; used where history has no
        match."""
        self._table = table
        self._after_two: dict[tuple[int, int], int] = {}
        self._after_three: dict[tuple[int, int, int], int] = {}
        self._tail: tuple[int, int, int] = (-1, -1, -1)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the history."""
        first, second, third = self._tail
        for token in tokens:
            if second >= 0:
                self._after_two[second, third] = token
                if first >= 0:
                    self._after_three[first, second, third] = token
            first, second, third = second, third, token
        self._tail = (first, second, third)

    def draft(self, length: int) -> list[tuple[int, float]]:
        """Up to `length` tokens that may come next, each with the log of its cumulative estimated probability."""
        first, second, third = self._tail
        score, drafted = 0.0, []
        for _ in range(length):
            token, prior = self._next(first, second, third)
            if token < 0:
                break
            score += math.log(prior)
            drafted.append((token, score))
            first, second, third = second, third, token
        return drafted

    def _next(self, first: int, second: int, third: int) -> tuple[int, float]:
        token = self._after_three.get((first, second, third))
        if token is not None:
            return token, TRIGRAM_PRIOR
        token = self._after_two.get((second, third))
        if token is not None:
            return token, BIGRAM_PRIOR
        return (int(self._table[third]) if self._table is not None and third >= 0 else -1), TABLE_PRIOR


def ngram_chains(roots: np.ndarray, indices: Sequence[NgramIndex], length: int) -> TokenTree:
    """A chain of up to `length` n-gram draft tokens per sequence; roots int32 [B] are the last tokens indexed."""
    chains = []
    for root, index in zip(roots.tolist(), indices, strict=True):
        nodes = [(root, -1, 0.0)]
        nodes += [(token, place, score) for place, (token, score) in enumerate(index.draft(length))]
        chains.append(nodes)
    return TokenTree.from_nodes(chains)


def count_bigrams(texts: Iterable[np.ndarray], vocab_size: int, min_count: int = 2) -> np.ndarray:
    """The most frequent successor of each token in token sequences: int32 [vocab_size], -1 below `min_count`."""
    pairs = [text[:-1].astype(np.int64) * vocab_size + text[1:] for text in map(np.asarray, texts) if len(text) > 1]
    table = np.full(vocab_size, -1, dtype=np.int32)
    if not pairs:
        return table
    codes, counts = np.unique(np.concatenate(pairs), return_counts=True)
    order = np.argsort(counts, kind="stable")
    codes, counts = codes[order], counts[order]
    codes = codes[counts >= min_count]
    table[codes // vocab_size] = codes % vocab_size
    return table
