"""Accepted nodes of draft trees by budget, from trees that were drafted once or at each budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import Verdict


@dataclass
class Acceptance:
    """How deep the accepted paths go in trees of each budget: filled by one run with the largest tree."""

    steps: list[tuple[list[float], list[float]]] = field(default_factory=list)
    """Each step of a sequence: the scores of all drafted nodes and of the accepted ones."""

    def observe(self, tree: TokenTree, sequence: int, verdict: Verdict) -> None:
        """Add one step."""
        scores = tree.scores[sequence, : tree.sizes[sequence]]
        self.steps.append((scores[1:].tolist(), scores[verdict.path[1:]].tolist()))

    def length(self, budget: int, running: int = 1) -> float:
        """Acceptance length (bonus token included) of `running` sequences whose trees have the `budget` x `running`
        best-scored nodes of all: those that stood in one step, as far as they are neighbours here."""
        gained = 0
        for first in range(0, len(self.steps), running):
            together = self.steps[first : first + running]
            ranked = sorted(chain.from_iterable(drafted for drafted, _ in together), reverse=True)
            least = ranked[: budget * len(together)][-1:]
            gained += sum(score >= least[0] for _, accepted in together for score in accepted) if least else 0
        return 1 + gained / max(len(self.steps), 1)


@dataclass
class CutAcceptance:
    """The same, measured with trees of each budget."""

    by_budget: dict[int, Acceptance]

    def length(self, budget: int, running: int = 1) -> float:
        """Acceptance length (bonus token included) with trees of `budget` nodes, however many sequences run."""
        return self.by_budget[budget].length(budget)
