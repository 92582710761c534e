"""Best-first growth of draft trees from two sources: a neural drafter's candidates and the sequence's own n-grams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np

from redraft.batch import DraftCandidates
from redraft.decoding.defaults import HIDDEN_SHARE
from redraft.decoding.ngram import LEAST, NgramIndex, learns, with_odds
from redraft.decoding.text_store import LONGEST
from redraft.decoding.token_tree import Node, TokenTree
from redraft.grammar.state import GrammarState, TokenPath

Child = tuple[int, tuple[int, float]]
"""A child's rank among the drafter's candidates, or after them, its token and its chance."""
NOTHING: tuple[list[int], list[float], list[float]] = [], [], []
MOST = 1 - 1e-6
"""No drafter is surer."""


def joint_odds(ngram: float, neural: float, joint: tuple[float, float]) -> float:
    """Return the odds that a token comes next which has the chance `ngram` by n-grams and `neural` by the drafter, by a
    formula whose two factors are fitted. A drafter that reads the context has seen what n-grams repeat: they add less
    to what it says, and mean less where it says otherwise."""
    odds = ngram / (1 - ngram)
    ngram_factor, joint_factor = joint
    return ngram_factor * odds + (1 + joint_factor * math.sqrt(odds)) * neural / (1 - neural)


def grow_trees(
    drafts: DraftCandidates,
    roots: np.ndarray,
    budget: int,
    indices: Sequence[NgramIndex],
    odds: Sequence[float],
    joint: tuple[float, float],
    grammars: Sequence[GrammarState | None] | None = None,
) -> TokenTree:
    """Trees of the `budget` most likely nodes each, grown node by node below the roots int32 [B].

    Wherever n-grams guess a token, its chance and the drafter's probability of it are joined, and the drafter's other
    candidates share what is left; where the drafter has no candidates, only the guess is left. `odds` is
    what each sequence's odds of n-gram guesses are multiplied by. `joint`: the factors of `joint_odds`. Where a
    sequence has a grammar, only what it allows grows: see `_allowed`. Scores are logs of chances, and a parent stands
    before its children.
    """
    for index in indices:  # first of all: what one teaches the texts counts for the others
        index.read()
    columns = (drafts.candidates.tolist(), drafts.log_probs.tolist(), drafts.parents.tolist())
    return TokenTree.from_nodes(
        [
            _grow(root, budget, index, factor, joint, grammar, *drafted)
            for root, index, factor, grammar, *drafted in zip(
                roots.tolist(), indices, odds, grammars or [None] * len(roots), *columns, strict=True
            )
        ]
    )


def _grow(
    root: int,
    budget: int,
    index: NgramIndex,
    factor: float,
    joint: tuple[float, float],
    grammar: GrammarState | None,
    candidates: list[list[list[int]]],
    log_probs: list[list[list[float]]],
    parents: list[list[int]],
) -> list[Node]:
    if learns(factor):
        index.expect()
    expanded = [[0], *parents[1:]]
    nodes: list[Node] = []
    tails: list[tuple[int, ...]] = []
    paths: list[TokenPath] = []
    offered = [(-1.0, -1, root, 0, 0, 0.0)]
    while offered:
        negative, parent, token, level, flat, above = heappop(offered)
        node = len(nodes)
        nodes.append((token, parent, math.log(-negative)))
        if node == budget:
            break
        tails.append((*tails[parent], token)[-LONGEST:] if node else index.tail)
        (tokens, logs, chances), first = NOTHING, 0
        if level < len(expanded) and flat in expanded[level]:
            beam = expanded[level].index(flat)
            tokens, logs = candidates[level][beam], log_probs[level][beam]
            chances, first = _chances(logs, above), beam * len(tokens)
        least = LEAST / -negative
        seen = index.seen(tails[node])
        if seen:
            seen = seen[0], with_odds(seen[1], factor)
        children: Iterable[Child] = enumerate(_children(tokens, chances, seen, joint))
        if grammar is not None:
            paths.append((*paths[parent], token) if node else ())
            children = _allowed(list(children), grammar, paths[node])
        for rank, (next_token, chance) in children:
            if chance > least:
                below = (first + rank, logs[rank]) if rank < len(logs) else (-1, 0.0)
                heappush(offered, (negative * chance, node, next_token, level + 1, *below))
    return nodes


def _chances(logs: list[float], above: float) -> list[float]:
    """The drafter's probabilities of the candidates of a node whose own log-probability is `above`.

    It computes only those of nodes that grow, without numpy: right after a step of the engine, each further function
    costs more than the sums.
    """
    if above == -math.inf:
        return [0.0] * len(logs)
    return [math.exp(log - above) for log in logs]


def _children(
    tokens: list[int], chances: list[float], seen: tuple[int, float] | None, joint: tuple[float, float]
) -> Iterable[tuple[int, float]]:
    """The tokens that may come next, and the chance of each: the drafter's, and after them the n-grams' if it is
    another."""
    if seen is None:
        return zip(tokens, chances, strict=True)
    guess, ngram = seen
    if not tokens:
        return [seen]
    drafted = guess in tokens
    neural = min(chances[tokens.index(guess)], MOST) if drafted else 0.0
    odds = joint_odds(ngram, neural, joint)
    both, left = odds / (1 + odds), 1 / (1 + odds) / (1 - neural)
    candidates = zip(tokens, chances, strict=True)
    children = [(token, both if token == guess else chance * left) for token, chance in candidates]
    return children if drafted else [*children, (guess, both)]


def _allowed(children: list[Child], grammar: GrammarState, path: TokenPath) -> list[Child]:
    """The children that a grammar allows after a path, with the chances that they have among its tokens. It leaves
    `HIDDEN_SHARE` of what it takes from others to tokens that nobody proposed. Its only token is certain."""
    mask = grammar.mask(path)
    count = np.count_nonzero(mask)
    if count == 1:
        token = int(mask.argmax())
        rank = next((rank for rank, (other, _) in children if other == token), len(children))
        return [] if token in grammar.end_ids else [(rank, (token, 1.0))]
    kept = [(rank, child) for rank, child in children if child[1] and mask[child[0]]]
    known, allowed = (sum(chance for _, (_, chance) in group) for group in (children, kept))
    hidden = max(count / len(mask), HIDDEN_SHARE) * max(1 - known, 0.0) + HIDDEN_SHARE * (known - allowed)
    return [(rank, (token, min(chance / (allowed + hidden), MOST))) for rank, (token, chance) in kept]
