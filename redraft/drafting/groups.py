"""Trees for part of a batch: some sequences draft in one way, the others in another."""

from __future__ import annotations

from collections.abc import Callable

from redraft.decoding.origins import Source
from redraft.decoding.token_tree import TokenTree, join_trees
from redraft.request_state import RequestState

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
