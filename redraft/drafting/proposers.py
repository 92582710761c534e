"""The ways to draft, one class each: random draws, a drafter's search, n-gram chains.

`propose` gives a tree per sequence, in their order. It may be larger than its limits: `Method` cuts it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from redraft.batch import DraftCandidates, DraftSampling
from redraft.budgets.choice import Choice, Terms
from redraft.bundle.method import MethodConfig
from redraft.decoding.construction import CONSTRUCTIONS
from redraft.decoding.draws import gumbel_noise
from redraft.decoding.growth import grow_trees
from redraft.decoding.native import NativeNgrams
from redraft.decoding.ngram import NGRAM_LENGTH, NgramIndex, ngram_chains
from redraft.decoding.random_trees import DrawShape, pack_draws
from redraft.decoding.scores import Scores
from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import VERIFIERS
from redraft.drafting import native
from redraft.drafting.cutting import TreeLimits
from redraft.drafting.groups import Group, note, split_trees
from redraft.drafting.inputs import draft_batch, next_noise, roots_of, sampling_filters, scores_of
from redraft.engines.api import DraftEngine, DrawingEngine
from redraft.request_state import RequestState


class Proposer(Protocol):
    """A way to draft."""

    def propose(self, sequences: Group, limits: TreeLimits) -> TokenTree:
        """Draft a tree for each sequence."""
        ...


class RandomTrees:
    """Trees of a drafter's random draws, for verifiers by rejection, and for walks."""

    def __init__(self, config: MethodConfig, shape: DrawShape, drafter: DraftEngine | None):
        """Raises ValueError where the drafter draws nothing at random."""
        if not isinstance(drafter, DrawingEngine):
            raise ValueError(
                f"{config.construction!r} needs a drafter that draws at random, and this engine's does not"
            )
        self._drafter, self._shape, self._support = drafter, shape, config.support
        self._walked = VERIFIERS[config.verification].merges

    def propose(self, sequences: Group, limits: TreeLimits) -> TokenTree:
        """Draw for all sequences, and keep each one's first draws.

        Where draws are weighed against p, a cut by score would change their law: they are cut here, in draw order. A
        walk only looks for the target's own token, so all its draws are kept for `Method` to cut by score.
        """
        roots = roots_of(sequences)
        counts = [
            len(self._shape.cut_order) if self._walked or sequence.sampler.greedy else nodes
            for sequence, nodes in zip(sequences, limits.nodes, strict=True)
        ]
        rows, samplers = sum(self._shape.noise_rows), [sequence.sampler for sequence in sequences]
        noise = [gumbel_noise(sampler.seed, sampler.position, rows, self._support) for sampler in samplers]
        filters = sampling_filters([sequence.request.sampling for sequence in sequences])
        draws = self._drafter.draw(draft_batch(sequences, roots), DraftSampling(np.stack(noise), **filters))
        tree = pack_draws(draws, roots, self._shape.within(np.array(counts), np.array(limits.depths)))
        return note("drafter", sequences, tree)


class SearchedTrees:
    """Trees of a drafter's search, by a construction, or grown together with the sequences' n-grams and grammars."""

    def __init__(self, config: MethodConfig, drafter: DraftEngine | None):
        """Raises ValueError where there is no drafter."""
        if drafter is None:
            raise ValueError(f"{config.construction!r} needs a drafter, and this engine has none for it")
        self._drafter, self._fitted = drafter, config.scores
        self._build = CONSTRUCTIONS[config.construction or ""].build
        self._grows = config.grows
        self._joint = config.ngram_scores.joint(drafter.reads_context)
        self._growth = native.Growth(self._joint, config.ngram_scores.chances)
        self._joins_ngrams = config.joins_ngrams
        self.candidates: DraftCandidates | None = None
        """The last draft, valid until the next."""

    def draft(self, sequences: Group, limits: TreeLimits, terms: Terms | None) -> tuple[TokenTree, Choice | None]:
        """Draft trees of sequences without grammars, cut by `cut_trees`."""
        drafts, roots = self._search(sequences)
        ngrams = sequences.once(self, self._ngrams) if self._joins_ngrams else None
        return native.draft_trees(drafts, roots, limits.largest, ngrams, limits, terms)

    def guess(self, sequences: Group, limits: TreeLimits, terms: Terms) -> tuple[TokenTree, Choice | None]:
        """Draft what n-grams guess, without the network."""
        nothing = np.zeros((len(sequences), 0, 1, 1))
        drafts = DraftCandidates(nothing.astype(np.int32), nothing.astype(np.float32), nothing[..., 0].astype(np.int32))
        ngrams = sequences.once(self, self._ngrams)
        return native.draft_trees(drafts, roots_of(sequences), limits.largest, ngrams, limits, terms)

    def propose(self, sequences: Group, limits: TreeLimits) -> TokenTree:
        """Draft in one call of the network. Trees are grown only where there is something to grow them by: without
        n-grams and grammars the construction gives the same nodes for less."""
        drafts, roots = self._search(sequences)
        if not (self._joins_ngrams or (self._grows and sequences.guided)):
            if self._grows:
                tree, _ = native.draft_trees(drafts, roots, limits.largest)
            else:
                tree = self._build(drafts, roots, limits.largest)
            return note("drafter", sequences, tree)
        tree = self._grow(drafts, roots, limits.largest, sequences)
        if sequences.guided:
            note("grammar", sequences, tree)
        self._note_origins(sequences, tree, drafts, roots)
        return tree

    def _search(self, sequences: Group) -> tuple[DraftCandidates, np.ndarray]:
        """Candidates, and the roots that they stand below."""
        roots = roots_of(sequences)
        noise = None if sequences.greedy else next_noise(sequences, scores_of(self._fitted, sequences))
        self.candidates = self._drafter.draft(draft_batch(sequences, roots), noise)
        return self.candidates, roots

    def _odds(self, sequences: Group) -> list[float]:
        """What the odds of n-grams are multiplied by."""
        return [score.ngram_odds for score in scores_of(self._fitted, sequences)]

    def _ngrams(self, sequences: Group) -> native.Ngrams:
        indices = [sequence.memory for sequence in sequences if isinstance(sequence.memory, NativeNgrams)]
        return native.Ngrams(indices, self._odds(sequences), self._growth)

    def _grow(self, drafts: DraftCandidates, roots: np.ndarray, budget: int, sequences: Group) -> TokenTree:
        """Grow trees in compiled code, and in Python those of sequences with a grammar."""

        def grow(indices: list[int]) -> TokenTree:
            ngrams = self._ngrams(sequences.of(indices))
            tree, _ = native.draft_trees(drafts.of(indices), roots[indices], budget, ngrams)
            return tree

        def grow_others(indices: list[int]) -> TokenTree:
            group = sequences.of(indices)
            guides = [sampler.grammar for sampler in group.samplers]
            rules = ngrams_of(group), self._odds(group), self._joint, guides
            return grow_trees(drafts.of(indices), roots[indices], budget, *rules)

        compiled = [
            sequence.sampler.grammar is None and isinstance(sequence.memory, NativeNgrams) for sequence in sequences
        ]
        return split_trees(compiled, grow, grow_others)

    def _note_origins(
        self,
        sequences: Group,
        tree: TokenTree,
        drafts: DraftCandidates,
        roots: np.ndarray,
    ) -> None:
        """Note what the drafter and what n-grams proposed of grown trees, where any request wants to see its tree: the
        growth itself does not tell them apart."""
        if not sequences.shown:
            return
        drafted, _ = native.draft_trees(drafts, roots, drafts.candidates[0].size)
        note("drafter", sequences, drafted)
        for sequence, nodes, index in zip(sequences, tree.nodes, ngrams_of(sequences), strict=True):
            if sequence.proposals is not None:
                sequence.proposals.add_guesses(nodes, index)


class NgramChains:
    """Chains of what followed the same tokens before, in the sequence's own text or in others'."""

    def __init__(self, fitted: tuple[Scores, ...]):
        self._fitted = fitted

    def propose(self, sequences: Group, limits: TreeLimits) -> TokenTree:
        """Guess up to NGRAM_LENGTH tokens: `Method` cuts them."""
        odds = [score.ngram_odds for score in scores_of(self._fitted, sequences)]
        return note("ngrams", sequences, ngram_chains(roots_of(sequences), ngrams_of(sequences), odds, NGRAM_LENGTH))


def ngrams_of(sequences: list[RequestState]) -> list[NgramIndex]:
    """The n-grams of each sequence; nothing where its method has none."""
    return [sequence.memory or NgramIndex() for sequence in sequences]


def proposers_of(config: MethodConfig, drafter: DraftEngine | None) -> list[Proposer]:
    """The ways that a method drafts in, whose trees are merged. Raises ValueError where the drafter cannot do it."""
    proposers: list[Proposer] = []
    if (shape := config.shape) is not None:
        proposers.append(RandomTrees(config, shape, drafter))
    elif config.construction is not None:
        proposers.append(SearchedTrees(config, drafter))
    if config.ngram and not config.joins_ngrams:  # else the tree that is grown has them
        proposers.append(NgramChains(config.scores))
    return proposers
