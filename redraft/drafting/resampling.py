"""Re-sampling of rejected drafts (Lyanna): what is left of a drafter's chain drafts again from another root.

A drafter of the kind that makes a chain gives raw logits for each step of a draft. After a step that accepts n tokens,
those from n on predict the tokens after the new root, without the features that a new draft would start from. A tree of
these costs a head, not a network. It is verified beside the new draft, on top of its budget (verification fusion,
section 6.2), or instead of it where much is left of the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from redraft.bundle.budget_table import Budget
from redraft.bundle.method import MethodConfig
from redraft.decoding.construction import best_first
from redraft.decoding.ngram import NgramIndex
from redraft.decoding.token_tree import Node, TokenTree, follow, merge_trees, prune_tree
from redraft.drafting.cutting import TreeLimits
from redraft.drafting.groups import Group, note, roots_only, split_trees
from redraft.drafting.inputs import next_noise, roots_of, scores_of
from redraft.drafting.method import Method
from redraft.drafting.proposers import NgramChains, SearchedTrees
from redraft.engines.api import DraftEngine, ResamplingEngine
from redraft.request import SequenceStats
from redraft.request_state import RequestState


class ChainMemory(NgramIndex):
    """A sequence's n-grams, if its method has any, the rest of its last chain, and its last tree before re-sampled
    nodes were merged in."""

    def __init__(
        self,
        stats: SequenceStats,
        prompt: Iterable[int] | None,
        bigrams: np.ndarray | None,
        chances: Mapping[int, Sequence[float]],
    ):
        """`prompt`: the text of n-grams; None: the method has none. `stats` count the tokens that only a chain held."""
        super().__init__(prompt or (), bigrams, chances)
        self._stats, self._indexes = stats, prompt is not None
        self.chain: np.ndarray | None = None
        """float32 [n, K], raw logits that predict the n tokens after the root; None: no draft left any."""
        self.fresh: list[Node] | None = None

    def left(self, threshold: int | None) -> bool:
        """Whether more steps than the threshold are left of the chain."""
        return threshold is not None and self.chain is not None and len(self.chain) > threshold

    def extend(self, tokens: Iterable[int]) -> None:
        """Append what a step gained: accepted tokens, and one of the target's own choice."""
        gained = list(tokens)
        if self._indexes:
            super().extend(gained)
        if self.chain is not None:
            self.chain = self.chain[len(gained) :]
        if self.fresh is not None:
            self._stats.reused += len(gained) - 1 - len(follow(self.fresh, gained[:-1]))
            self.fresh = None


class ResamplingMethod(Method):
    """A method that drafts again from the rest of chains: where more than `resample_above` steps are left (Lyanna's r)
    up to `resample_budget` nodes beside a new draft, and where more than `skip_above` are left instead of one."""

    def __init__(self, config: MethodConfig, drafter: DraftEngine | None, max_tree: int, *args: Any):
        super().__init__(config, drafter, max_tree, *args)
        self._resampler = drafter
        self._room = self._most - config.resample_budget
        self._chains = NgramChains(config.scores)

    def remember(self, sequence: RequestState) -> ChainMemory:
        """See `Method.remember`."""
        prompt = sequence.prompt.tolist() if self._config.ngram else None
        bigrams = self._bigrams if self._config.ngram else None
        return ChainMemory(sequence.stats, prompt, bigrams, self._config.ngram_scores.chances)

    def _trees(self, sequences: Group, budgets: list[Budget]) -> TokenTree:
        limits = self._limits(sequences, budgets)
        memories = [memory_of(sequence) for sequence in sequences]
        skips = [memory.left(self._config.skip_above) for memory in memories]
        resampled = self._guide(sequences, self._resample(sequences, memories, limits.largest), limits.largest)
        tree = self._draft_anew(sequences, memories, skips, limits)
        if not self._config.grows or any(skips):  # what stands in for a skipped draft was not grown by the grammars
            tree = self._guide(sequences, tree, limits.largest)
        for memory, nodes in zip(memories, tree.nodes, strict=True):
            memory.fresh = nodes
        # Instead of a new draft re-sampled nodes take its budget, and compete for it; beside one they come on top of
        # it, after the cut, so that they displace no new node.
        instead = [nodes if skip else 0 for nodes, skip in zip(limits.nodes, skips, strict=True)]
        tree = merge_trees([tree, prune_tree(resampled, instead, limits.depths, limits.scores)])
        beside = [0 if skip else self._config.resample_budget for skip in skips]
        resampled = prune_tree(resampled, beside, limits.depths, limits.scores)
        tree = self._cut(tree, limits, len(resampled.tokens) - len(resampled))
        for memory, nodes, skip in zip(memories, tree.nodes, skips, strict=True):
            memory.fresh = memory.fresh if skip else nodes
        return merge_trees([tree, resampled])

    def _draft_anew(
        self, sequences: Group, memories: list[ChainMemory], skips: list[bool], limits: TreeLimits
    ) -> TokenTree:
        """New drafts, whose chains are kept, except for the sequences that skip theirs: these have n-grams at most."""

        def draft(group: list[int]) -> TokenTree:
            tree = self._propose(sequences.of(group), limits.of(group))
            for proposer in self._proposers:
                candidates = proposer.candidates if isinstance(proposer, SearchedTrees) else None
                if candidates is not None and candidates.raw_logits is not None:
                    for index, logits in zip(group, candidates.raw_logits, strict=True):
                        memories[index].chain = logits.copy()  # the engine's array is the next draft's too
            return tree

        def skip(group: list[int]) -> TokenTree:
            skipping = sequences.of(group)
            return self._chains.propose(skipping, limits.of(group)) if self._config.ngram else roots_only(skipping)

        return split_trees([not skipped for skipped in skips], draft, skip)

    def _resample(self, sequences: Group, memories: list[ChainMemory], nodes: int) -> TokenTree:
        """Trees from what earlier drafts left (Lyanna, algorithm 2); only the root where too little is left."""

        def resample(group: list[int]) -> TokenTree:
            assert isinstance(self._resampler, ResamplingEngine)
            chosen = sequences.of(group)
            chains = [chain for index in group if (chain := memories[index].chain) is not None]
            roots, noise = roots_of(chosen), next_noise(chosen, scores_of(self._config.scores, chosen))
            return note("resampled", chosen, best_first(self._resampler.resample(chains, roots, noise), roots, nodes))

        left = [memory.left(self._config.resample_above) for memory in memories]
        return split_trees(left, resample, lambda group: roots_only(sequences.of(group)))


def memory_of(sequence: RequestState) -> ChainMemory:
    """The memory that `ResamplingMethod.remember` gave a sequence."""
    assert isinstance(sequence.memory, ChainMemory)
    return sequence.memory
