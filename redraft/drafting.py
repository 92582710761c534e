"""The drafting part of a step: one drafter call for the whole batch, trees built, merged and cut to their budgets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redraft.budget import BudgetTable
from redraft.decoding.construction import CONSTRUCTIONS
from redraft.decoding.ngram import NgramIndex, ngram_chains
from redraft.decoding.token_tree import TokenTree, merge_trees, prune_tree
from redraft.decoding.verification import check_pairing
from redraft.engines.interface import Engine
from redraft.sequence import Sequence


@dataclass(frozen=True)
class DraftingPlan:
    """What to draft and how to verify it. `construction` None: no neural drafter, the n-gram branch alone."""

    construction: str | None
    verification: str = "sampled_walk"
    ngram: bool = False
    ngram_length: int = 5
    budget: BudgetTable | None = None

    def __post_init__(self) -> None:
        check_pairing(self.construction or "chain", self.verification, merged=self.ngram)


class DraftSource:
    """Makes the draft trees of a step according to a plan."""

    def __init__(self, plan: DraftingPlan | None, engine: Engine, max_tree: int, bigrams: np.ndarray | None = None):
        """`max_tree`: most rows of a tree, root included; `bigrams`: see `NgramIndex`. No plan: no drafts."""
        self._plan = plan
        self._engine = engine
        self._most = max_tree - 1
        self._bigrams = bigrams

    def index(self, prompt: np.ndarray) -> NgramIndex | None:
        """The n-gram index of a new sequence, if the plan has an n-gram branch."""
        return NgramIndex(prompt.tolist(), self._bigrams) if self._plan and self._plan.ngram else None

    def draft(self, sequences: list[Sequence]) -> TokenTree:
        """Draft trees of the sequences (root alone where the budget is 0 or one token remains), in their order."""
        roots = np.fromiter((sequence.root for sequence in sequences), dtype=np.int32, count=len(sequences))
        budgets = self._budgets(sequences)
        if self._plan is None or not budgets.any():
            return TokenTree.root_only(roots)
        chosen = np.flatnonzero(budgets)
        drafted = self._trees([sequences[place] for place in chosen], roots[chosen], budgets[chosen])
        return drafted if len(chosen) == len(sequences) else _spread(drafted, chosen, roots)

    def _budgets(self, sequences: list[Sequence]) -> np.ndarray:
        if self._plan is None or self._plan.budget is None:
            return np.zeros(len(sequences), dtype=np.int32)
        greedy, sampled = (self._plan.budget.lookup(len(sequences), kind) for kind in (True, False))
        budgets = [
            min(greedy if sequence.sampler.greedy else sampled, self._most) if sequence.remaining > 1 else 0
            for sequence in sequences
        ]
        return np.array(budgets, dtype=np.int32)

    def _trees(self, sequences: list[Sequence], roots: np.ndarray, budgets: np.ndarray) -> TokenTree:
        assert self._plan is not None
        trees = []
        if self._plan.construction is not None:
            hidden = np.stack([sequence.hidden for sequence in sequences if sequence.hidden is not None])
            candidates = self._engine.draft(hidden, roots)
            trees.append(CONSTRUCTIONS[self._plan.construction].build(candidates, roots, int(budgets.max())))
        if self._plan.ngram:
            indices = [sequence.ngram for sequence in sequences if sequence.ngram is not None]
            trees.append(ngram_chains(roots, indices, self._plan.ngram_length))
        tree = merge_trees(trees)
        deepest = np.array([sequence.remaining - 1 for sequence in sequences], dtype=np.int32)
        if (tree.sizes - 1 > budgets).any() or (tree.depth.max(axis=1) > deepest).any():
            tree = prune_tree(tree, budgets, deepest)
        return tree


def _spread(tree: TokenTree, places: np.ndarray, roots: np.ndarray) -> TokenTree:
    """The trees put at `places` of a batch whose other sequences have their root alone."""
    shape = (len(roots), tree.tokens.shape[1])
    tokens, parents = np.zeros(shape, dtype=np.int32), np.full(shape, -1, dtype=np.int32)
    sizes = np.ones(len(roots), dtype=np.int32)
    tokens[:, 0] = roots
    tokens[places], parents[places], sizes[places] = tree.tokens, tree.parents, tree.sizes
    return TokenTree(tokens, parents, sizes)
