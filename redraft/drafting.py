"""The drafting part of a step: one drafter call for the whole batch, trees built, merged and cut to their budgets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from redraft.budget import BudgetTable
from redraft.decoding.construction import CONSTRUCTIONS
from redraft.decoding.draws import gumbel_noise
from redraft.decoding.ngram import NgramIndex, ngram_chains
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS, DrawShape, pack_draws
from redraft.decoding.token_tree import TokenTree, merge_trees, prune_tree
from redraft.decoding.verification import check_pairing
from redraft.engines.interface import DraftSampling, DrawingEngine, Engine
from redraft.protocol import MIN_TEMPERATURE, SamplingConfig
from redraft.sequence import Sequence


@dataclass(frozen=True)
class DraftingPlan:
    """What to draft and how to verify it. `construction` None: no neural drafter, the n-gram branch alone.

    A random construction draws `levels` tokens on each level (as its shape counts them) from the drafter's `support`
    tokens per node. Raises ValueError (PairingError) for a plan that makes no sense.
    """

    construction: str | None
    verification: str = "sampled_walk"
    ngram: bool = False
    ngram_length: int = 8
    budget: BudgetTable | None = None
    levels: tuple[int, ...] = ()
    support: int = 0

    def __post_init__(self) -> None:
        check_pairing(self.construction or "chain", self.verification, merged=self.ngram)
        if self.shape and (self.support < 1 or not self.levels or min(self.levels) < 1):
            raise ValueError(
                f"{self.construction!r} needs levels of 1 draw or more and a support of 1 token or more, got levels "
                f"{self.levels} and support {self.support}"
            )

    @cached_property
    def shape(self) -> DrawShape | None:
        """What is fixed of a random construction's draws; None for the others."""
        random = RANDOM_CONSTRUCTIONS.get(self.construction or "")
        return random.shape(self.levels) if random else None


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
        deepest = np.array([sequence.remaining - 1 for sequence in sequences], dtype=np.int32)
        trees = []
        if self._plan.shape is not None:
            trees.append(self._random_trees(self._plan.shape, sequences, roots, budgets, deepest))
        elif self._plan.construction is not None:
            hidden = np.stack([sequence.hidden for sequence in sequences if sequence.hidden is not None])
            candidates = self._engine.draft(hidden, roots)
            trees.append(CONSTRUCTIONS[self._plan.construction].build(candidates, roots, int(budgets.max())))
        if self._plan.ngram:
            indices = [sequence.ngram for sequence in sequences if sequence.ngram is not None]
            trees.append(ngram_chains(roots, indices, self._plan.ngram_length))
        tree = merge_trees(trees)
        if (tree.sizes - 1 > budgets).any() or (tree.depth.max(axis=1) > deepest).any():
            tree = prune_tree(tree, budgets, deepest)
        return tree

    def _random_trees(
        self, shape: DrawShape, sequences: list[Sequence], roots: np.ndarray, budgets: np.ndarray, deepest: np.ndarray
    ) -> TokenTree:
        assert self._plan is not None
        assert isinstance(self._engine, DrawingEngine)
        hidden = np.stack([sequence.hidden for sequence in sequences if sequence.hidden is not None])
        rows, support = sum(shape.noise_rows), self._plan.support
        temperature, top_k, top_p = zip(*(_filters(sequence.request.sampling) for sequence in sequences), strict=True)
        samplers = [sequence.sampler for sequence in sequences]
        sampling = DraftSampling(
            noise=np.stack([gumbel_noise(sampler.seed, sampler.position, rows, support) for sampler in samplers]),
            temperature=np.array(temperature, dtype=np.float32),
            top_k=np.array(top_k, dtype=np.int32),
            top_p=np.array(top_p, dtype=np.float32),
        )
        return pack_draws(self._engine.draw(hidden, roots, sampling), roots, shape.kept(budgets, deepest))


def _filters(config: SamplingConfig) -> tuple[float, int, float]:
    """Temperature, top-k and top-p to draft with: the request's; a greedy one draws the most probable tokens."""
    if config.greedy:
        return MIN_TEMPERATURE, 0, 1.0
    temperature = 1.0 if config.temperature is None else config.temperature
    return temperature, config.top_k or 0, 1.0 if config.top_p is None else config.top_p


def _spread(tree: TokenTree, places: np.ndarray, roots: np.ndarray) -> TokenTree:
    """The trees put at `places` of a batch whose other sequences have their root alone."""
    shape = (len(roots), tree.tokens.shape[1])
    tokens, parents = np.zeros(shape, dtype=np.int32), np.full(shape, -1, dtype=np.int32)
    sizes = np.ones(len(roots), dtype=np.int32)
    tokens[:, 0] = roots
    tokens[places], parents[places], sizes[places] = tree.tokens, tree.parents, tree.sizes
    if tree.draws is None:
        return TokenTree(tokens, parents, sizes)
    drawn = dict(zip(places.tolist(), tree.draws, strict=True))
    return TokenTree(tokens, parents, sizes, draws=[drawn.get(place, {}) for place in range(len(roots))])
