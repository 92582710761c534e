"""A method at work: it drafts for a batch, merges and cuts the trees to their budgets, and verifies them."""

from __future__ import annotations

import math
from itertools import compress

import numpy as np

from redraft.budgets.choice import Choice, Terms
from redraft.budgets.controller import MethodBudgets
from redraft.bundle.budget_table import Budget
from redraft.bundle.method import MethodConfig
from redraft.decoding.native import NativeNgrams, NativeTextStore
from redraft.decoding.ngram import NgramIndex
from redraft.decoding.sampling import Sampler
from redraft.decoding.text_store import JOINED
from redraft.decoding.token_tree import TokenTree, merge_trees, prune_tree, without_tokens
from redraft.decoding.verification import VERIFIERS, walk
from redraft.drafting import native
from redraft.drafting.cutting import TreeLimits
from redraft.drafting.groups import Group, note, roots_only, split_trees
from redraft.drafting.proposers import SearchedTrees, proposers_of
from redraft.engines.api import DraftEngine
from redraft.grammar.guided import guided_trees
from redraft.pairs import Pairs
from redraft.request_state import RequestState

SPARE = 2
"""Drafts made for each one wanted, where grammars may forbid some of them afterwards."""
NO_BUDGET = Budget(0)


class AutoRegressive:
    """The method that drafts nothing."""

    reads_features = False
    """Whether it drafts from the target's features."""
    fixed_budget = True
    """Whether it drafts the same whatever pays."""

    def __init__(self) -> None:
        self.verify = VERIFIERS["greedy"].verify

    def remember(self, sequence: RequestState) -> NgramIndex | None:
        """Nothing."""
        return None

    def pairs(self) -> Pairs | None:
        """None: there is no drafter to read them."""
        return None

    def chooser(self, sequence: RequestState) -> Sampler | None:
        """The sampler that may choose the sequence's token at every node, from now on for good; None where verification
        needs the logits."""
        sampler, request = sequence.sampler, sequence.request
        walks = self.verify is walk or sampler.greedy
        scored = request.return_log_probs or (request.prompt_log_probs and not sequence.prefilled)
        return sampler if walks and sampler.plain and not scored else None

    def draft(self, sequences: Group, running: int) -> TokenTree:
        """Roots only."""
        return roots_only(sequences)


class Method(AutoRegressive):
    """A method of a bundle."""

    def __init__(
        self,
        config: MethodConfig,
        drafter: DraftEngine | None,
        max_tree: int,
        bigrams: np.ndarray | None = None,
        unknown_tokens: frozenset[int] = frozenset(),
        budgets: MethodBudgets | None = None,
        texts: NativeTextStore | None = None,
    ):
        """`max_tree`: most rows of a tree, root included; `bigrams`: see `NgramIndex`; `unknown_tokens` are never
        sampled. `budgets` say how much pays; None, or where the configuration fixes a budget: that is drafted. `texts`
        that were served join what n-grams guess.

        Raises ValueError for a method that makes no sense, or asks of the drafter what it cannot do.
        """
        super().__init__()
        config.check()
        self._config, self._drafter, self._bigrams, self._unknown_tokens = config, drafter, bigrams, unknown_tokens
        self._texts = texts
        self.reads_features = drafter is not None
        self._verifier = VERIFIERS[config.verification]
        self.verify = self._verifier.verify
        self._table = config.table
        self._most = max_tree - 1
        self._room = self._most
        """Drafted nodes of a tree that budgets are given from."""
        self._random = config.shape is not None
        self._proposers = proposers_of(config, drafter)
        first, *others = self._proposers
        self._searched = first if isinstance(first, SearchedTrees) and config.grows and not others else None
        """Where it is the only proposer, and compiled: what drafts and cuts at once."""
        # Where draws are weighed, what is drafted decides the text: a seed's text may not depend on a load.
        self._budgets = budgets if self._verifier.merges and config.budget is None else None
        self.fixed_budget = self._budgets is None

    def remember(self, sequence: RequestState) -> NgramIndex | None:
        """What the method keeps of a new sequence's text and is told every token of, if it drafts from such."""
        if not self._config.ngram:
            return None
        chances = self._config.ngram_scores.chances
        least = 1 if self._drafter is None else JOINED
        return NativeNgrams(sequence.prompt.tolist(), self._bigrams, chances, self._texts, sequence.scope, least)

    def pairs(self) -> Pairs | None:
        """Where a new sequence keeps its pairs, if the drafter reads them."""
        if self._drafter is None or not self._drafter.reads_context:
            return None
        # Draws decide the answer where they are weighed: then no pair may be missing, or the seed gives another text.
        return Pairs(self._drafter.reads_text, whole=not self._verifier.merges)

    def draft(self, sequences: Group, running: int) -> TokenTree:
        """Draft trees of the sequences, in their order, while `running` decode.

        A tree is only its root where the budget is 0 or one token remains.
        """
        budgets = self._most_nodes(sequences, running)
        drafting = [budget.nodes > 0 for budget in budgets]
        if all(drafting):
            tree = self._trees(sequences, budgets)
        else:
            tree = split_trees(
                drafting,
                lambda group: self._trees(sequences.of(group), [budgets[index] for index in group]),
                lambda group: roots_only(sequences.of(group)),
            )
        # Of draws that are verified by rejection none may be left out: the others would be of another law.
        drops = self._unknown_tokens and self._verifier.merges
        return without_tokens(tree, self._unknown_tokens) if drops else tree

    def _most_nodes(self, sequences: Group, running: int) -> list[Budget]:
        """The most that may be drafted for each sequence. With an estimate of what pays, nothing where drafting does
        not, so that the drafter is not called."""
        drafting = [sequence.remaining > 1 for sequence in sequences]
        if self._budgets is not None:
            bands = [*compress(sequences.bands, drafting)]
            most = Budget(self._config.tree_budget) if bands and self._budgets.pay(bands) else NO_BUDGET
            return [most if drafts else NO_BUDGET for drafts in drafting]
        temperatures = sequences.temperatures
        budgets = {temperature: self._table.lookup(running, temperature) for temperature in set(temperatures)}
        return [
            budgets[temperature] if drafts else NO_BUDGET
            for drafts, temperature in zip(drafting, temperatures, strict=True)
        ]

    def _trees(self, sequences: Group, budgets: list[Budget]) -> TokenTree:
        """Trees of sequences that each have a budget."""
        limits = self._limits(sequences, budgets)
        if self._searched is not None and not (sequences.guided or sequences.shown):
            guessed = self._guessed(self._searched, sequences, limits)
            return guessed or self._taken(*self._searched.draft(sequences, limits, self._terms()))
        tree = self._propose(sequences, limits)
        if not self._config.grows:  # a tree that is grown keeps to the grammars as it grows
            tree = self._guide(sequences, tree, limits.largest)
        return self._cut(tree, limits)

    def _guessed(self, searched: SearchedTrees, sequences: Group, limits: TreeLimits) -> TokenTree | None:
        """Trees of what n-grams and texts guess, where these make the step so fast that the drafter's call would not
        pay; else None."""
        if self._budgets is None or not self._config.joins_ngrams:
            return None
        tree, choice = searched.guess(sequences, limits, self._budgets.guess_terms())
        return self._taken(tree, choice) if choice and self._budgets.guesses_suffice(choice) else None

    def _limits(self, sequences: Group, budgets: list[Budget]) -> TreeLimits:
        nodes = [min(budget.nodes, self._room) for budget in budgets]
        guided = sequences.guided and not self._config.grows
        # Of a fixed budget one tree may take all; of one that is chosen each has its own at most.
        shared = sum(nodes) if self._budgets is None else max(nodes)
        return TreeLimits(
            nodes=nodes,
            depths=[sequence.remaining - 1 for sequence in sequences],
            scores=[math.log(budget.chance) if budget.chance else -math.inf for budget in budgets],
            largest=min(shared * (SPARE if guided else 1), self._most),
            most=self._room,
        )

    def _propose(self, sequences: Group, limits: TreeLimits) -> TokenTree:
        return merge_trees([proposer.propose(sequences, limits) for proposer in self._proposers])

    def _guide(self, sequences: Group, tree: TokenTree, most: int) -> TokenTree:
        """The tree by the grammars of sequences that are verified by a walk; see `guided_nodes`. Draws that are weighed
        stay as they were drawn: leaving out those that a grammar forbids would change the law of the others."""
        walked = self._verifier.merges
        grammars = [sequence.sampler.grammar if walked or sequence.sampler.greedy else None for sequence in sequences]
        return note("grammar", sequences, guided_trees(tree, grammars, most)) if any(grammars) else tree

    def _cut(self, tree: TokenTree, limits: TreeLimits, beside: int = 0) -> TokenTree:
        """The trees cut by `cut_trees`, to the nodes that pay where `beside` others are verified. Random draws that are
        weighed have been cut in draw order, each sequence's by itself."""
        if self._random and self._budgets is None:
            return prune_tree(tree, limits.nodes, limits.depths)
        return self._taken(*native.cut_trees(tree, limits, self._terms(beside)), beside)

    def _terms(self, beside: int = 0) -> Terms | None:
        return None if self._budgets is None else self._budgets.terms(beside)

    def _taken(self, tree: TokenTree, choice: Choice | None, beside: int = 0) -> TokenTree:
        """The tree itself, after its nodes were counted as what is verified."""
        if self._budgets is not None and choice is not None:
            self._budgets.take(choice, beside)
        return tree
