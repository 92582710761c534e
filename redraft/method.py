"""The drafting part of a step: one drafter call for the whole batch, trees built, merged and cut to their budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from redraft.batch import DraftBatch, DraftSampling, SharedNoise
from redraft.bundle.budget import Budget, BudgetTable, Scores
from redraft.decoding.construction import CONSTRUCTIONS, best_first
from redraft.decoding.draws import gumbel_noise
from redraft.decoding.growth import grow_trees
from redraft.decoding.ngram import NgramIndex, ngram_chains
from redraft.decoding.origins import Source
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS, DrawShape, pack_draws
from redraft.decoding.retrieval import NGRAM_TRIE, Retrieval, RetrievalText, retrieved_trees
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import (
    TokenTree,
    join_trees,
    merge_trees,
    prune_tree,
    shared_budgets,
    without_tokens,
)
from redraft.decoding.verification import VERIFIERS, check_pairing, walk
from redraft.engines.api import DraftEngine, DrawingEngine, ResamplingEngine
from redraft.engines.features import join
from redraft.grammar.guided import guided_trees
from redraft.request import SamplingConfig
from redraft.sequence import Pairs, Sequence

MakeTrees = Callable[[list[Sequence]], TokenTree]
NO_BUDGET = Budget(0)


@dataclass(frozen=True)
class MethodPlan:
    """What to draft and how to verify it: a method's configuration with the budgets that tuning measured.

    Without a `construction` there is no neural drafter, only the n-gram branch. NGRAM_TRIE has no neural drafter
    either: it grows trees of what followed the same tokens in all that the method has served, and with `ngram` in
    the text itself first.

    A random construction draws `levels` tokens on each level (as its shape counts them) from the drafter's `support`
    most likely tokens per node. Where more than `resample_above` steps are left of a drafter's chain
    (Lyanna's r), up to `resample_budget` nodes are re-sampled from it and verified with the new draft, on top of its
    budget (verification fusion, Lyanna 6.2). Where more than `skip_above` are left, they are drafted instead, within
    that budget. None means never. Raises ValueError (PairingError) for a plan that makes no sense.
    """

    construction: str | None
    verification: str = "sampled_walk"
    ngram: bool = False
    ngram_length: int = 16
    """Deepest that n-grams draft: code that is edited repeats for long."""
    budget: BudgetTable | None = None
    levels: tuple[int, ...] = ()
    support: int = 0
    resample_above: int | None = None
    resample_budget: int = 0
    skip_above: int | None = None

    @property
    def retrieves(self) -> bool:
        """Whether it drafts from what was served, without a neural drafter."""
        return self.construction == NGRAM_TRIE

    def __post_init__(self) -> None:
        merged = self.ngram or self.resample_above is not None
        check_pairing(self.construction or "chain", self.verification, merged)
        if self.shape and (self.support < 1 or not self.levels or min(self.levels) < 1):
            raise ValueError(
                f"{self.construction!r} needs levels of 1 draw or more and a support of 1 token or more, got levels "
                f"{self.levels} and support {self.support}"
            )

    @property
    def shares_noise(self) -> bool:
        """Whether the drafter takes the target's noise."""
        return self.support > 0 and not self.levels

    @property
    def joins_ngrams(self) -> bool:
        """Whether n-grams grow one tree with the drafter's or others' texts', instead of a chain beside that tree."""
        return self.ngram and self.construction in ("best_first", NGRAM_TRIE)

    @property
    def grows(self) -> bool:
        """Whether trees can be grown node by node, by the sequences' grammars."""
        return self.construction == "best_first"

    @cached_property
    def shape(self) -> DrawShape | None:
        """What is fixed of a random construction's draws; None for the others."""
        random = RANDOM_CONSTRUCTIONS.get(self.construction or "")
        return random.shape(self.levels) if random else None


SPARE = 2
"""Drafts made for each one wanted, where grammars may forbid some of them afterwards."""


class Method:
    """A method at work: it makes the draft trees of a step by its plan, and verifies them."""

    def __init__(
        self,
        plan: MethodPlan | None,
        drafter: DraftEngine | None,
        max_tree: int,
        bigrams: np.ndarray | None = None,
        served: Collection[Iterable[int]] = (),
        unknown_tokens: frozenset[int] = frozenset(),
    ):
        """`max_tree`: most rows of a tree, root included; `bigrams`: see `NgramIndex`; `served`: texts to retrieve from
        before any was served; `unknown_tokens` are never sampled. No plan: no drafts.

        Raises ValueError where the plan asks of the drafter what it cannot do.
        """
        if plan and plan.construction and not plan.retrieves and drafter is None:
            raise ValueError(f"{plan.construction!r} needs a drafter, and this engine has none for it")
        if plan and plan.shape and not isinstance(drafter, DrawingEngine):
            raise ValueError(f"{plan.construction!r} needs a drafter that draws at random, and this engine's does not")
        self._plan = plan
        self._drafter = drafter
        self._most = max_tree - 1
        self._unknown_tokens = unknown_tokens
        self._bigrams = bigrams
        self._retrieval = Retrieval.of(served) if plan and plan.retrieves else None
        self.verify = VERIFIERS[plan.verification if plan else "greedy"].verify

    def index(self, prompt: np.ndarray) -> NgramIndex | RetrievalText | None:
        """The n-grams of a new sequence, if the plan drafts from such."""
        ngram = self._plan is not None and self._plan.ngram
        if self._retrieval is not None:
            return RetrievalText(self._retrieval, prompt.tolist(), own_first=ngram)
        return NgramIndex(prompt.tolist(), self._bigrams) if ngram else None

    def pairs(self) -> Pairs | None:
        """Where a new sequence keeps its pairs, if the drafter reads them."""
        if self._plan is None or self._drafter is None or not self._drafter.reads_context:
            return None
        return Pairs(self._drafter.reads_text, whole=not VERIFIERS[self._plan.verification].merges)

    def chooser(self, sequence: Sequence) -> Sampler | None:
        """The sampler that may choose the sequence's token at every node; None where verification needs the logits."""
        sampler, request = sequence.sampler, sequence.request
        walks = self.verify is walk or sampler.greedy
        scored = request.return_log_probs or (request.prompt_log_probs and not sequence.prefilled)
        return sampler if walks and sampler.plain and not scored else None

    def draft(self, sequences: list[Sequence], running: int) -> TokenTree:
        """Draft trees of the sequences, in their order, while `running` decode.

        A tree is only its root where the budget is 0 or one token remains.
        """
        budgets = self._budgets(sequences, running)
        given = [budget for budget in budgets if budget.nodes]
        tree = _spread_over(sequences, [budget.nodes > 0 for budget in budgets], lambda some: self._trees(some, given))
        # Of draws that are verified by rejection none may be left out: the others would be of another law.
        drops = self._unknown_tokens and self._plan is not None and VERIFIERS[self._plan.verification].merges
        return without_tokens(tree, self._unknown_tokens) if drops else tree

    def _budgets(self, sequences: list[Sequence], running: int) -> list[Budget]:
        if self._plan is None or self._plan.budget is None:
            return [NO_BUDGET] * len(sequences)
        temperatures = [_temperature(sequence) for sequence in sequences]
        found = {temperature: self._plan.budget.lookup(running, temperature) for temperature in set(temperatures)}
        return [
            found[temperature] if sequence.remaining > 1 else NO_BUDGET
            for sequence, temperature in zip(sequences, temperatures, strict=True)
        ]

    def _scores(self, sequences: list[Sequence]) -> list[Scores]:
        """How the sequences' nodes are scored: a batch's greedy and sampled trees compete by their scores."""
        assert self._plan is not None
        assert self._plan.budget is not None
        temperatures = [_temperature(sequence) for sequence in sequences]
        found = {temperature: self._plan.budget.scores_at(temperature) for temperature in set(temperatures)}
        return [found[temperature] for temperature in temperatures]

    def _ngram_odds(self, sequences: list[Sequence]) -> list[float]:
        return [one.ngram_odds for one in self._scores(sequences)]

    def _trees(self, sequences: list[Sequence], given: list[Budget]) -> TokenTree:
        assert self._plan is not None
        deepest = [sequence.remaining - 1 for sequence in sequences]
        most = self._most - self._plan.resample_budget
        budgets = [min(budget.nodes, most) for budget in given]
        least = [math.log(budget.chance) if budget.chance else -math.inf for budget in given]
        cut = not self._plan.grows and any(sequence.sampler.grammar for sequence in sequences)
        largest = min(sum(budgets) * (SPARE if cut else 1), self._most)
        again = [_left(sequence, self._plan.skip_above) for sequence in sequences]
        resampled = None
        if self._plan.resample_above is not None:
            resampled = self._guided(sequences, self._resampled(sequences, largest), largest)
        trees = []
        if self._plan.shape is not None:
            trees.append(
                _proposed("drafter", sequences, self._random_trees(self._plan.shape, sequences, budgets, deepest))
            )
        elif self._plan.retrieves:
            texts = [sequence.ngram for sequence in sequences if isinstance(sequence.ngram, RetrievalText)]
            odds = self._ngram_odds(sequences)
            retrieved = retrieved_trees(texts, budgets, self._plan.ngram_length, least, odds)
            trees.append(_proposed("ngrams", sequences, retrieved))
        elif self._plan.construction is not None:
            anew = [not instead for instead in again]
            skipped = self._ngram_chains if self._plan.joins_ngrams else _root_only
            trees.append(_spread_over(sequences, anew, lambda some: self._drafted(some, largest), skipped))
        if self._plan.ngram and not self._plan.joins_ngrams:
            trees.append(self._ngram_chains(sequences))
        tree = merge_trees(trees)
        if not self._plan.grows or any(again):
            tree = self._guided(sequences, tree, largest)
        if self._plan.shape is not None:
            return prune_tree(tree, budgets, deepest)
        if resampled is not None:
            for sequence, nodes in zip(sequences, tree.nodes, strict=True):
                sequence.fresh = nodes
            room = [budget if instead else 0 for budget, instead in zip(budgets, again, strict=True)]
            tree = merge_trees([tree, prune_tree(resampled, room, deepest, least)])
        if len(sequences) > 1:
            tree = prune_tree(tree, [most] * len(sequences), deepest, least)
            budgets = shared_budgets(tree, sum(budgets))
        tree = prune_tree(tree, budgets, deepest, least)
        if resampled is not None:
            for sequence, nodes, instead in zip(sequences, tree.nodes, again, strict=True):
                sequence.fresh = sequence.fresh if instead else nodes
            beside = [0 if instead else self._plan.resample_budget for instead in again]
            tree = merge_trees([tree, prune_tree(resampled, beside, deepest, least)])
        return tree

    def _guided(self, sequences: list[Sequence], tree: TokenTree, most: int) -> TokenTree:
        """The tree by the grammars of sequences that are verified by a walk; see `guided_nodes`."""
        assert self._plan is not None
        merges = VERIFIERS[self._plan.verification].merges
        grammars = [one.sampler.grammar if merges or one.sampler.greedy else None for one in sequences]
        return _proposed("grammar", sequences, guided_trees(tree, grammars, most)) if any(grammars) else tree

    def _drafted(self, sequences: list[Sequence], budget: int) -> TokenTree:
        """New drafts; chains that they leave are kept."""
        assert self._plan is not None
        assert self._drafter is not None
        roots = np.array([sequence.root for sequence in sequences], dtype=np.int32)
        candidates = self._drafter.draft(_batch(sequences, roots), _shared_noise(sequences, self._scores(sequences)))
        if self._plan.resample_above is not None and candidates.raw_logits is not None:
            for sequence, logits in zip(sequences, candidates.raw_logits, strict=True):
                sequence.chain = logits.copy()
        grammars = [sequence.sampler.grammar for sequence in sequences]
        if not (self._plan.joins_ngrams or (self._plan.grows and any(grammars))):
            tree = CONSTRUCTIONS[self._plan.construction or ""].build(candidates, roots, budget)
            return _proposed("drafter", sequences, tree)
        indices, odds = _indices(sequences), self._ngram_odds(sequences)
        tree = grow_trees(candidates, roots, budget, indices, odds, self._drafter.reads_context, grammars)
        if any(grammars):
            _proposed("grammar", sequences, tree)
        if any(sequence.proposals is not None for sequence in sequences):
            _proposed("drafter", sequences, best_first(candidates, roots, candidates.candidates[0].size))
            for sequence, nodes, index in zip(sequences, tree.nodes, indices, strict=True):
                if sequence.proposals is not None:
                    sequence.proposals.add_guesses(nodes, index)
        return tree

    def _ngram_chains(self, sequences: list[Sequence]) -> TokenTree:
        assert self._plan is not None
        roots = np.array([sequence.root for sequence in sequences], dtype=np.int32)
        chains = ngram_chains(roots, _indices(sequences), self._ngram_odds(sequences), self._plan.ngram_length)
        return _proposed("ngrams", sequences, chains)

    def _resampled(self, sequences: list[Sequence], budget: int) -> TokenTree:
        """Trees from what earlier drafts left (Lyanna, algorithm 2); only the root where too little is left."""
        assert self._plan is not None

        def again(some: list[Sequence]) -> TokenTree:
            assert isinstance(self._drafter, ResamplingEngine)
            roots = np.array([sequence.root for sequence in some], dtype=np.int32)
            chains = [sequence.chain for sequence in some if sequence.chain is not None]
            noise = _shared_noise(some, self._scores(some))
            return _proposed("resampled", some, best_first(self._drafter.resample(chains, roots, noise), roots, budget))

        return _spread_over(sequences, [_left(sequence, self._plan.resample_above) for sequence in sequences], again)

    def _random_trees(
        self, shape: DrawShape, sequences: list[Sequence], budgets: list[int], deepest: list[int]
    ) -> TokenTree:
        """Trees of random draws: cut to their budgets where only a cut in draw order is lossless, else to be pruned."""
        assert self._plan is not None
        assert isinstance(self._drafter, DrawingEngine)
        roots = np.array([sequence.root for sequence in sequences], dtype=np.int32)
        any_cut = VERIFIERS[self._plan.verification].merges
        limits = [
            len(shape.cut_order) if any_cut or sequence.sampler.greedy else budget
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        rows, support = sum(shape.noise_rows), self._plan.support
        samplers = [sequence.sampler for sequence in sequences]
        noise = [gumbel_noise(sampler.seed, sampler.position, rows, support) for sampler in samplers]
        sampling = DraftSampling(np.stack(noise), **_filters([sequence.request.sampling for sequence in sequences]))
        draws = self._drafter.draw(_batch(sequences, roots), sampling)
        return pack_draws(draws, roots, shape.kept(np.array(limits), np.array(deepest)))


def _proposed(source: Source, sequences: list[Sequence], tree: TokenTree) -> TokenTree:
    """The tree, noted as what a source proposes for the sequences that want to know."""
    for place, sequence in enumerate(sequences):
        if sequence.proposals is not None:
            sequence.proposals.add(source, tree.nodes[place])
    return tree


def _filters(samplings: list[SamplingConfig]) -> dict[str, np.ndarray]:
    """Temperature float32, top-k int32 and top-p float32 [B] to draft with by name: the requests'."""
    filters = np.array([_filter(sampling) for sampling in samplings])
    dtypes = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32}
    return {name: column.astype(dtype) for (name, dtype), column in zip(dtypes.items(), filters.T, strict=True)}


def _filter(config: SamplingConfig) -> tuple[float, int, float]:
    if config.greedy:
        return 0.0, 0, 1.0
    return config.divisor, config.top_k or 0, config.top_p or 1.0


def _temperature(sequence: Sequence) -> float:
    """That of the request; 0: greedy."""
    return _filter(sequence.request.sampling)[0]


def _shared_noise(sequences: list[Sequence], scores: list[Scores]) -> SharedNoise:
    """The noise of the tokens that come next in each sequence."""
    samplers = [sequence.sampler for sequence in sequences]
    seeds = np.array([sampler.seed for sampler in samplers], np.uint64)
    positions = np.array([sampler.position for sampler in samplers], np.int32)
    return noise_at(seeds, positions, [sequence.request.sampling for sequence in sequences], scores)


def noise_at(
    seeds: np.ndarray, positions: np.ndarray, samplings: list[SamplingConfig], scores: list[Scores]
) -> SharedNoise:
    """The noise of seeds uint64 [B] at output positions int32 [B]. The slope of the log-probabilities that it is added
    to is a drafter's temperature below the request's own. It is 1 where top-p cuts tokens: it would move the cut."""
    filters = _filters(samplings)
    tuned = np.array([one.slope for one in scores], np.float32)
    slopes = np.where(filters["top_p"] < 1, np.float32(1), tuned)
    betas = [one.beta(temperature) for one, temperature in zip(scores, filters["temperature"].tolist(), strict=True)]
    return SharedNoise(
        seeds=seeds,
        positions=positions,
        sharpness=np.array(betas, np.float32),
        **filters | {"temperature": filters["temperature"] / slopes},
    )


def _batch(sequences: list[Sequence], roots: np.ndarray) -> DraftBatch:
    """Where sequences draft from; a drafter with a context ingests their pairs with this draft."""
    kept = [sequence.pairs for sequence in sequences if sequence.pairs is not None]
    if not kept:
        rows = [sequence.features for sequence in sequences if sequence.features is not None]
        return DraftBatch.of_roots(join(rows), roots)
    cache_lengths = [pairs.ingested for pairs in kept]
    features, tokens = zip(*(pairs.take() for pairs in kept), strict=True)
    return DraftBatch(
        features=join([rows for parts in features for rows in parts]),
        tokens=np.array([token for part in tokens for token in part], np.int32),
        row_offsets=np.cumsum([0, *map(len, tokens)], dtype=np.int32),
        slots=np.array([sequence.slot for sequence in sequences], np.int32),
        cache_lengths=np.array(cache_lengths, np.int32),
    )


def _left(sequence: Sequence, threshold: int | None) -> bool:
    """Whether more steps than the threshold are left of the sequence's chain."""
    return threshold is not None and sequence.chain is not None and len(sequence.chain) > threshold


def _indices(sequences: list[Sequence]) -> list[NgramIndex]:
    """The n-grams of each sequence; nothing where its method has none."""
    return [one.ngram if isinstance(one.ngram, NgramIndex) else NgramIndex() for one in sequences]


def _root_only(sequences: list[Sequence]) -> TokenTree:
    return TokenTree.root_only(sequence.root for sequence in sequences)


def _spread_over(
    sequences: list[Sequence], chosen: list[bool], make: MakeTrees, make_others: MakeTrees = _root_only
) -> TokenTree:
    """The trees that `make` gives for the chosen sequences, and `make_others` for the others."""
    if all(chosen):
        return make(sequences)
    groups = [[place for place, one in enumerate(chosen) if one is wanted] for wanted in (True, False)]
    made = [
        (group, build([sequences[place] for place in group]))
        for group, build in zip(groups, (make, make_others), strict=True)
        if group
    ]
    return join_trees(made)
