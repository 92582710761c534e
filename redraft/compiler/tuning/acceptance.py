"""What draft trees of each size would have gained, from trees that were drafted once or at each budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import Verdict


@dataclass(frozen=True)
class Gain:
    """A step's expected gain per sequence: tokens (bonus token included) with their standard error, and rows of its
    tree (root included)."""

    tokens: float
    error: float
    rows: float


class Gains(Protocol):
    """Expected gains by how trees are cut."""

    def expect(self, nodes: int, chance: float, running: int) -> Gain:
        """The gain with trees of at most `nodes` drafted nodes for each of `running` sequences, each node of at least
        `chance` to be accepted."""
        ...


@dataclass
class Acceptance:
    """Steps with the largest trees: what any smaller tree would have gained follows from the scores of the accepted
    nodes among those of all."""

    steps: list[tuple[list[float], list[bool]]] = field(default_factory=list)
    """Each step of a sequence: scores of the drafted nodes, and whether each was accepted."""
    _ranked: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)

    def observe(self, tree: TokenTree, sequence: int, verdict: Verdict) -> None:
        """Add one step. A node counts at most as much as its parent, as trees are cut."""
        scores: list[float] = []
        for _, parent, score in tree.nodes[sequence]:
            scores.append(min(score, scores[parent]) if parent >= 0 else score)
        accepted = set(verdict.path)
        self.steps.append((scores[1:], [node in accepted for node in range(1, len(scores))]))
        self._ranked.clear()

    def expect(self, nodes: int, chance: float, running: int = 1) -> Gain:
        """See `Gains`. Sequences that ran in one step, as far as they are neighbours here, share its rows: the best of
        all their nodes."""
        if not self.steps:
            return Gain(1.0, 0.0, 1.0)
        scores, gained, sizes = self._rank(running)
        likely = scores >= math.log(chance) if chance else scores > -np.inf
        kept = np.minimum(likely.sum(1), nodes * sizes)
        tokens = gained[np.arange(len(kept)), kept]
        spread = float((tokens / sizes).std(ddof=1)) if len(sizes) > 1 else math.inf
        return Gain(
            tokens=1 + float(tokens.sum()) / len(self.steps),
            error=spread / math.sqrt(len(sizes)) if kept.any() else 0.0,
            rows=1 + float(kept.sum()) / len(self.steps),
        )

    def _rank(self, running: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each step of `running` sequences: its nodes' scores, best first and -inf after the last; how many of the
        first k nodes were accepted, k = 0, 1, ...; and how many sequences it has."""
        if running not in self._ranked:
            groups = [self.steps[first : first + running] for first in range(0, len(self.steps), running)]
            width = max(sum(len(scores) for scores, _ in group) for group in groups)
            scores = np.full((len(groups), width), -np.inf)
            accepted = np.zeros((len(groups), width), dtype=int)
            for row, group in enumerate(groups):
                pairs = [pair for step in group for pair in zip(*step, strict=True)]
                pairs.sort(key=lambda pair: -pair[0])
                for rank, (score, right) in enumerate(pairs):
                    scores[row, rank], accepted[row, rank] = score, right
            gained = np.concatenate([np.zeros((len(groups), 1), dtype=int), accepted.cumsum(1)], axis=1)
            self._ranked[running] = scores, gained, np.array([len(group) for group in groups])
        return self._ranked[running]


@dataclass
class CutAcceptance:
    """The same, measured with trees of each budget: of random trees, which are cut in draw order."""

    by_budget: dict[int, Acceptance]

    def expect(self, nodes: int, chance: float, running: int = 1) -> Gain:
        """See `Gains`; the trees have no nodes that could be left out for their `chance`."""
        return self.by_budget[nodes].expect(nodes, 0.0) if nodes else Gain(1.0, 0.0, 1.0)
