"""Parts of a batch: some sequences draft in one way, the others in another."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar, cast

from redraft.budgets.gain import bands_of
from redraft.decoding.native import Walkers
from redraft.decoding.origins import Source
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import TokenTree, join_trees
from redraft.request_state import RequestState

Made = TypeVar("Made")


class Group(list[RequestState]):
    """Sequences that decode together. What stays the same of them while they do is found out once."""

    @cached_property
    def temperatures(self) -> list[float]:
        """See `RequestState`."""
        return [sequence.temperature for sequence in self]

    @cached_property
    def bands(self) -> list[int]:
        """See `bands_of`."""
        return bands_of(self.temperatures)

    @cached_property
    def methods(self) -> list[str]:
        """The names of their methods."""
        return [sequence.method for sequence in self]

    @cached_property
    def samplers(self) -> list[Sampler]:
        """Their samplers."""
        return [sequence.sampler for sequence in self]

    @cached_property
    def greedy(self) -> bool:
        """Whether all are."""
        return all(sampler.greedy for sampler in self.samplers)

    @cached_property
    def guided(self) -> bool:
        """Whether any has a grammar."""
        return any(sampler.grammar is not None for sampler in self.samplers)

    @cached_property
    def filtered(self) -> bool:
        """Whether any changes the logits that its tokens are drawn from: see `Sampler.filters`."""
        return any(sampler.filters for sampler in self.samplers)

    @cached_property
    def walkers(self) -> Walkers:
        """Their samplers, none of which has a grammar."""
        return Walkers(self.samplers)

    @cached_property
    def reads_features(self) -> bool:
        """Whether any one's drafter reads features."""
        return any(sequence.reads_features for sequence in self)

    @cached_property
    def shown(self) -> bool:
        """Whether any request wants to see its trees."""
        return any(sequence.proposals is not None for sequence in self)

    @cached_property
    def _made(self) -> dict[object, Any]:
        return {}

    def once(self, maker: object, make: Callable[[Group], Made]) -> Made:
        """What `make` gives of the group, which it is asked for once by each `maker`."""
        if maker not in self._made:
            self._made[maker] = make(self)
        return cast(Made, self._made[maker])

    def of(self, indices: list[int]) -> Group:
        """The sequences at these indices."""
        return Group(self[index] for index in indices)


MakeTrees = Callable[[list[int]], TokenTree]
"""Makes the trees of the sequences at these indices of a batch."""


def roots_only(sequences: list[RequestState]) -> TokenTree:
    """Trees without drafts."""
    return TokenTree.root_only(sequence.root for sequence in sequences)


def split_trees(chosen: list[bool], make: MakeTrees, make_others: MakeTrees) -> TokenTree:
    """The trees that `make` gives for the chosen sequences of a batch, and `make_others` for the others, in the batch's
    order."""
    if all(chosen):
        return make([*range(len(chosen))])
    groups = [[index for index, is_chosen in enumerate(chosen) if is_chosen is wanted] for wanted in (True, False)]
    parts = [(group, build(group)) for group, build in zip(groups, (make, make_others), strict=True) if group]
    return join_trees(parts)


def note(source: Source, sequences: list[RequestState], tree: TokenTree) -> TokenTree:
    """The tree itself, after its nodes were noted as what a source proposes, for requests that want to see trees."""
    for index, sequence in enumerate(sequences):
        if sequence.proposals is not None:  # asked first: `nodes` may have to be made from arrays
            sequence.proposals.add(source, tree.nodes[index])
    return tree
