"""Drafting without a model from all that a worker has served: n-gram retrieval over prompts and answers.

The trie of what followed which tokens is not stored as nodes but as what nodes are counted from: for each of a few
match lengths, the places of the last `capacity` tokens that followed the same tokens, newest first. A draft tree is the
part of the trie below a text's end that is most likely by these counts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence

from redraft.decoding.defaults import NGRAM_CHANCES, RETRIEVAL_ESCAPES
from redraft.decoding.ngram import NgramIndex, with_odds
from redraft.decoding.token_tree import Node, TokenTree

NGRAM_TRIE = "ngram_trie"
"""The construction's name in a bundle's configuration."""
LONGEST = max(RETRIEVAL_ESCAPES)
OCCURRENCES = 8
EVERYBODY = 1
"""The scope of texts that nobody tells apart."""
CAPACITY = 1 << 17


class Retrieval:
    """What followed which tokens in the texts of all requests, the newest `capacity` tokens; older ones are forgotten
    one by one, whatever text they stood in. A text matches those of its own scope only. A token takes about 0.5 KB."""

    def __init__(self, capacity: int = CAPACITY):
        self._capacity = capacity
        self._total = 0
        self._private = itertools.count(-2, -1)  # -1 has the hash of -2
        self._tokens = array("i", bytes(4 * capacity))
        # Per match length: place of the newest token that followed a match, by the match's hash; then for each place,
        # the place before it that followed the same match, and the match's hash.
        self._index = [
            (length, dict[int, int](), array("q", bytes(8 * capacity)), array("q", bytes(8 * capacity)))
            for length in RETRIEVAL_ESCAPES
        ]

    @classmethod
    def of(cls, texts: Iterable[Iterable[int]]) -> Retrieval:
        """A memory of texts that were served."""
        memory = cls()
        for text in texts:
            RetrievalText(memory, text).read()
        return memory

    def __len__(self) -> int:
        """Tokens that are remembered."""
        return min(self._total, self._capacity)

    def private_scope(self) -> int:
        """A scope that no other text has."""
        return next(self._private)

    def add(self, scope: int, tail: tuple[int, ...], token: int) -> None:
        """Remember that a token followed `tail`, the last tokens of a text (LONGEST of them where there are)."""
        position, slot = self._total, self._total % self._capacity
        self._tokens[slot] = token
        for length, newest, before, matches in self._index:
            if newest.get(matches[slot]) == position - self._capacity:
                del newest[matches[slot]]
            if length <= len(tail):
                match = hash((scope, tail[-length:]))
                before[slot] = newest.get(match, -1)
                newest[match] = position
                matches[slot] = match
        self._total += 1

    def match(self, scope: int, tail: tuple[int, ...]) -> int:
        """The length of the longest match of `tail`'s end, 0 where there is none."""
        oldest = self._total - len(self)
        for length, newest, _, _ in self._index:
            if length <= len(tail) and newest.get(hash((scope, tail[-length:])), -1) >= oldest:
                return length
        return 0

    def after(self, scope: int, tail: tuple[int, ...]) -> dict[int, float]:
        """Estimated probabilities of the tokens that may follow `tail`; empty where nothing is known.

        A match of length n that was last followed by C tokens (at most OCCURRENCES are looked at), c times by token t,
        gives t the probability (c + e p) / (C + e) with e = RETRIEVAL_ESCAPES[n] and p the next shorter match's.
        """
        oldest, capacity, tokens = self._total - len(self), self._capacity, self._tokens
        chances: dict[int, float] = {}
        mass = 1.0
        for length, newest, before, _ in self._index:
            if length > len(tail) or (position := newest.get(hash((scope, tail[-length:])), -1)) < oldest:
                continue
            followers: list[int] = []
            while position >= oldest and len(followers) < OCCURRENCES:
                slot = position % capacity
                followers.append(tokens[slot])
                position = before[slot]
            share = mass / (len(followers) + RETRIEVAL_ESCAPES[length])
            for token in followers:
                chances[token] = chances.get(token, 0.0) + share
            mass = share * RETRIEVAL_ESCAPES[length]
        return chances


class RetrievalText:
    """One request's text while it is served: read into the shared memory, drafted from at its end. A text is read when
    it is first drafted from, so that none is where nothing is drafted."""

    def __init__(
        self,
        retrieval: Retrieval,
        tokens: Iterable[int] = (),
        own_first: bool = False,
        chances: Mapping[int, Sequence[float]] = NGRAM_CHANCES,
        scope: int = EVERYBODY,
    ):
        """`own_first`: what followed in this text itself goes before what followed as long a match in others, with
        `chances` as in `NgramScores`. `scope`: whose texts it is drafted from and belongs to; 0: only itself."""
        self._retrieval, self._chances = retrieval, chances
        self._scope = scope or retrieval.private_scope()
        self._own = NgramIndex(chances=chances) if own_first else None
        self._tail: tuple[int, ...] = ()
        self._unread = list(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        self._unread += tokens

    def read(self) -> None:
        """Put what is new into the memory."""
        add, tail = self._retrieval.add, self._tail
        for token in self._unread:
            add(self._scope, tail, token)
            tail = (*tail, token)[-LONGEST:]
        self._tail = tail
        if self._own is not None:
            self._own.extend(self._unread)
        self._unread.clear()

    def after(self) -> dict[int, float]:
        """The tokens that may follow the text, each with its chance in greedy answers."""
        self.read()
        return self._after(self._tail)

    def draft(self, budget: int, depth: int, least: float = -math.inf, odds: float = 1.0) -> list[Node]:
        """The tree below the text's last token: the `budget` most likely paths of up to `depth` tokens, none whose log
        probability is below `least`. `odds`: see `with_odds`."""
        self.read()
        nodes: list[Node] = [(self._tail[-1], -1, 0.0)]
        tails, depths = [self._tail], [0]
        waiting: list[tuple[float, int, int]] = []
        node = 0
        while len(nodes) <= budget:
            if depths[node] < depth:
                score = nodes[node][2]
                for token, chance in self._after(tails[node]).items():
                    if (below := score + math.log(with_odds(chance, odds))) >= least:
                        heapq.heappush(waiting, (-below, node, token))
            if not waiting:
                break
            cost, parent, token = heapq.heappop(waiting)
            node = len(nodes)
            nodes.append((token, parent, -cost))
            tails.append((*tails[parent], token)[-LONGEST:])
            depths.append(depths[parent] + 1)
        return nodes

    def _after(self, tail: tuple[int, ...]) -> dict[int, float]:
        """The tokens that may follow `tail`, each with its chance."""
        if self._own is not None and (match := self._own.match(tail)):
            token, length, times = match
            if length >= self._retrieval.match(self._scope, tail):
                return {token: self._chances[length][times - 1]}
        return self._retrieval.after(self._scope, tail)


def retrieved_trees(
    texts: Sequence[RetrievalText], budgets: Sequence[int], depth: int, least: Sequence[float], odds: Sequence[float]
) -> TokenTree:
    """A tree per text of up to so many draft nodes of such least scores, with each text's own odds."""
    limits = zip(texts, budgets, least, odds, strict=True)
    return TokenTree.from_nodes([text.draft(budget, depth, score, factor) for text, budget, score, factor in limits])
