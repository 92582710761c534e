"""Drafting without a model: what followed the same words before, in the prompt and in the answer so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from redraft.decoding.defaults import NGRAM_CHANCES, SUCCESSOR_CHANCE
from redraft.decoding.text_store import LONGEST, TextMatch, TextStore
from redraft.decoding.token_tree import Node, TokenTree

NGRAM_LENGTH = 16
"""Deepest that n-grams draft: code that is edited repeats for long."""
MOST_TIMES = 4
LEAST = 0.01
"""A node of less chance is not worth its row."""


class NgramIndex:
    """What followed the last 1 to 6 tokens of one sequence most recently; O(1) per token, spent at the next draft.
    Where texts of other requests have a likelier guess, theirs counts."""

    def __init__(
        self,
        tokens: Iterable[int] = (),
        table: np.ndarray | None = None,
        chances: Mapping[int, Sequence[float]] = NGRAM_CHANCES,
        texts: TextStore | None = None,
        scope: int = 0,
        least: int = 1,
    ):
        """`table`: int32 [V], the usual successor of each token, -1 where there is none; guessed where no match is
        likelier. `chances`: see `NgramScores`. `texts` were served to other requests; those of `scope` count, 0: none,
        by matches of `least` tokens or more."""
        self._table, self._chances = table, chances
        self.texts, self.scope = (texts, scope) if scope else (None, 0)
        self._least = least
        self._expected: TextMatch | None = None
        """What the texts guessed of the next token."""
        self._successors: dict[tuple[int, ...], tuple[int, int]] = {}
        self._tail: tuple[int, ...] = ()
        self.unread = list(tokens)
        """Tokens that it was told and has not read."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the history."""
        self.unread += tokens

    @property
    def tail(self) -> tuple[int, ...]:
        """The last tokens of the history, as many as can be matched."""
        self.read()
        return self._tail

    def expect(self) -> None:
        """Have the texts learn from the next token whether they guess it."""
        self.read()
        if self.texts is not None and (match := self.texts.match(self.scope, self._tail, self._least)):
            self._expected = match

    def read(self) -> None:
        """Read what it was told; the texts learn from the first token."""
        if not self.unread:
            return
        successors, tail = self._successors, self._tail
        if self.texts is not None and self._expected is not None:
            self.texts.learn(self._expected, self.unread[0])
            self._expected = None
        for token in self.unread:
            for length in NGRAM_CHANCES:
                if length <= len(tail):
                    match = tail[-length:]
                    successor, times = successors.get(match, (token, 0))
                    successors[match] = token, times + 1 if successor == token else 1
            tail = (*tail, token)[-LONGEST:]
        self._tail = tail
        self.unread.clear()

    def draft(self, length: int, odds: float = 1.0) -> list[tuple[int, float]]:
        """Up to `length` tokens that may come next, each with the log of its cumulative estimated probability, which is
        at least LEAST's. `odds`: see `with_odds`."""
        if learns(odds):
            self.expect()
        tail, score, drafted = self.tail, 0.0, []
        for _ in range(length):
            token, chance = self.guess(tail)
            score += math.log(with_odds(chance, odds))
            if token < 0 or score < math.log(LEAST):
                break
            drafted.append((token, score))
            tail = (*tail, token)[-LONGEST:]
        return drafted

    def guess(self, tail: tuple[int, ...]) -> tuple[int, float]:
        """The token that may follow `tail` and the chance that it does; -1 where nothing is known."""
        usual = int(self._table[tail[-1]]) if self._table is not None and tail else -1
        seen = self.seen(tail)
        return seen if seen and (usual < 0 or seen[1] >= SUCCESSOR_CHANCE) else (usual, SUCCESSOR_CHANCE)

    def seen(self, tail: tuple[int, ...]) -> tuple[int, float] | None:
        """The token that followed the longest known end of `tail`, and the chance that it does again; or what the texts
        guess, if that is likelier."""
        guess = None
        if successor := self.match(tail):
            token, length, times = successor
            guess = token, self._chances[length][times - 1]
        other = self.texts.guess(self.scope, tail, self._least) if self.texts is not None else None
        return other if other and (guess is None or other[1] > guess[1]) else guess

    def match(self, tail: tuple[int, ...]) -> tuple[int, int, int] | None:
        """What followed the longest known end of `tail`, that end's length, and how often in a row (4: or more)."""
        self.read()
        longest = None
        for length in reversed(NGRAM_CHANCES):
            successor = self._successors.get(tail[-length:]) if length <= len(tail) else None
            if successor is None:  # what never occurred did not occur after other tokens either
                break
            longest = successor[0], length, min(successor[1], MOST_TIMES)
        return longest


def learns(odds: float) -> bool:
    """Whether texts learn from a sequence whose odds are multiplied so: chances are those of greedy answers."""
    return odds == 1


def with_odds(chance: float, factor: float) -> float:
    """A chance below 1 whose odds are multiplied by `factor`."""
    if factor == 1:
        return chance
    odds = factor * chance / (1 - chance)
    return odds / (1 + odds)


def ngram_chains(roots: np.ndarray, indices: Sequence[NgramIndex], odds: Sequence[float], length: int) -> TokenTree:
    """A chain of up to `length` n-gram draft tokens per sequence; roots int32 [B] are the last tokens indexed, `odds`
    are each sequence's own: see `with_odds`."""
    chains = []
    for root, index, factor in zip(roots.tolist(), indices, odds, strict=True):
        nodes: list[Node] = [(root, -1, 0.0)]
        nodes += [(token, parent, score) for parent, (token, score) in enumerate(index.draft(length, factor))]
        chains.append(nodes)
    return TokenTree.from_nodes(chains)


def count_bigrams(texts: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """The most frequent successor of each token in token sequences: int32 [vocab_size], -1 for one that came once."""
    pairs = [text[:-1].astype(np.int64) * vocab_size + text[1:] for text in map(np.asarray, texts) if len(text) > 1]
    table = np.full(vocab_size, -1, dtype=np.int32)
    if not pairs:
        return table
    codes, counts = np.unique(np.concatenate(pairs), return_counts=True)
    order = np.argsort(counts, kind="stable")
    codes, counts = codes[order], counts[order]
    codes = codes[counts > 1]
    table[codes // vocab_size] = codes % vocab_size
    return table
