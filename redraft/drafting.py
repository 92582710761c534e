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
from redraft.decoding.verification import VERIFIERS, check_pairing
from redraft.engines.interface import DraftBatch, DraftSampling, DrawingEngine, Engine
from redraft.protocol import SamplingConfig
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
        self.reads_context = plan is not None and plan.construction is not None and engine.reads_context
        """Whether sequences are to keep their pairs"""

    def index(self, prompt: np.ndarray) -> NgramIndex | None:
        """The n-gram index of a new sequence, if the plan has an n-gram branch."""
        return NgramIndex(prompt.tolist(), self._bigrams) if self._plan and self._plan.ngram else None

    def draft(self, sequences: list[Sequence]) -> TokenTree:
        """Draft trees of the sequences (root alone where the budget is 0 or one token remains), in their order."""
        budgets = self._budgets(sequences)
        drafting = [sequence for sequence, budget in zip(sequences, budgets, strict=True) if budget]
        if not drafting:
            return TokenTree.root_only(sequence.root for sequence in sequences)
        drafted = self._trees(drafting, [budget for budget in budgets if budget])
        return drafted if len(drafting) == len(sequences) else _spread(drafted, budgets, sequences)

    def _budgets(self, sequences: list[Sequence]) -> list[int]:
        if self._plan is None or self._plan.budget is None:
            return [0] * len(sequences)
        lookup, running = self._plan.budget.lookup, len(sequences)
        return [
            min(lookup(running, sequence.sampler.greedy), self._most) if sequence.remaining > 1 else 0
            for sequence in sequences
        ]

    def _trees(self, sequences: list[Sequence], budgets: list[int]) -> TokenTree:
        assert self._plan is not None
        roots = np.array([sequence.root for sequence in sequences], dtype=np.int32)
        deepest = [sequence.remaining - 1 for sequence in sequences]
        trees = []
        if self._plan.shape is not None:
            trees.append(self._random_trees(self._plan.shape, sequences, roots, budgets, deepest))
        elif self._plan.construction is not None:
            candidates = self._engine.draft(_batch(sequences, roots))
            trees.append(CONSTRUCTIONS[self._plan.construction].build(candidates, roots, max(budgets)))
        if self._plan.ngram:
            indices = [sequence.ngram for sequence in sequences if sequence.ngram is not None]
            trees.append(ngram_chains(roots, indices, self._plan.ngram_length))
        return prune_tree(merge_trees(trees), budgets, deepest)

    def _random_trees(
        self, shape: DrawShape, sequences: list[Sequence], roots: np.ndarray, budgets: list[int], deepest: list[int]
    ) -> TokenTree:
        """Trees of random draws: cut to their budgets where only a cut in draw order is lossless, else to be pruned."""
        assert self._plan is not None
        assert isinstance(self._engine, DrawingEngine)
        any_cut = VERIFIERS[self._plan.verification].merges
        limits = [
            len(shape.cut_order) if any_cut or sequence.sampler.greedy else budget
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        rows, support = sum(shape.noise_rows), self._plan.support
        temperature, top_k, top_p = zip(*(_filters(sequence.request.sampling) for sequence in sequences), strict=True)
        samplers = [sequence.sampler for sequence in sequences]
        sampling = DraftSampling(
            noise=np.stack([gumbel_noise(sampler.seed, sampler.position, rows, support) for sampler in samplers]),
            temperature=np.array(temperature, dtype=np.float32),
            top_k=np.array(top_k, dtype=np.int32),
            top_p=np.array(top_p, dtype=np.float32),
        )
        draws = self._engine.draw(_batch(sequences, roots), sampling)
        return pack_draws(draws, roots, shape.kept(np.array(limits), np.array(deepest)))


def _filters(config: SamplingConfig) -> tuple[float, int, float]:
    """Temperature, top-k and top-p to draft with: the request's."""
    if config.greedy:
        return 0.0, 0, 1.0
    temperature = 1.0 if config.temperature is None else config.temperature
    return temperature, config.top_k or 0, 1.0 if config.top_p is None else config.top_p


def _batch(sequences: list[Sequence], roots: np.ndarray) -> DraftBatch:
    """Where sequences draft from; a drafter with a context ingests their pairs with this draft."""
    kept = [sequence.pairs for sequence in sequences if sequence.pairs is not None]
    if not kept:
        return DraftBatch.of_roots(np.array([sequence.hidden for sequence in sequences]), roots)
    cache_lengths = [pairs.ingested for pairs in kept]
    hidden, tokens = zip(*(pairs.take() for pairs in kept), strict=True)
    return DraftBatch(
        hidden=np.concatenate([rows for parts in hidden for rows in parts]),
        tokens=np.array([token for part in tokens for token in part], np.int32),
        row_offsets=np.cumsum([0, *map(len, tokens)], dtype=np.int32),
        slots=np.array([sequence.slot for sequence in sequences], np.int32),
        cache_lengths=np.array(cache_lengths, np.int32),
    )


def _spread(drafted: TokenTree, budgets: list[int], sequences: list[Sequence]) -> TokenTree:
    """The trees drafted for the sequences that have a budget, and the root alone for the others."""
    nodes, draws = iter(drafted.nodes), iter(drafted.draws or [])
    tree = TokenTree.from_nodes(
        [next(nodes) if budget else [(sequence.root, -1, 0.0)]
         for sequence, budget in zip(sequences, budgets, strict=True)]
    )  # fmt: skip
    if drafted.draws is not None:
        tree.draws = [next(draws) if budget else {} for budget in budgets]
    return tree
