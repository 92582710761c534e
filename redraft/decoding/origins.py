"""What proposed each node of a draft tree, told only of sequences whose request wants to see their trees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from redraft.decoding.ngram import NgramIndex
from redraft.decoding.text_store import LONGEST
from redraft.decoding.token_tree import Node

if TYPE_CHECKING:
    from redraft.grammar.state import TokenPath
    from redraft.request import Origin

Source = Literal["drafter", "ngrams", "resampled", "grammar"]
"""What can propose a node."""


class Proposals:
    """What each source proposed for one sequence's next tree, kept until the tree is verified."""

    def __init__(self) -> None:
        self._paths: defaultdict[Source, set[TokenPath]] = defaultdict(set)

    def add(self, source: Source, nodes: Iterable[Node]) -> None:
        """All nodes of a tree below its root."""
        self._paths[source].update(_paths(nodes)[1:])

    def add_guesses(self, nodes: Iterable[Node], index: NgramIndex) -> None:
        """The nodes of a grown tree that n-grams guessed."""
        for path in _paths(nodes)[1:]:
            seen = index.seen((*index.tail, *path[:-1])[-LONGEST:])
            if seen and seen[0] == path[-1]:
                self._paths["ngrams"].add(path)

    def take(self, nodes: Iterable[Node]) -> list[Origin]:
        """The origins of a tree's nodes. The proposals are forgotten."""
        paths, self._paths = self._paths, defaultdict(set)
        return ["root", *(_origin([name for name in paths if path in paths[name]]) for path in _paths(nodes)[1:])]


def _origin(sources: list[Source]) -> Origin:
    fresh = [source for source in sources if source in ("drafter", "ngrams")]
    if fresh:
        return "both" if len(fresh) == 2 else fresh[0]
    return "grammar" if sources == ["grammar"] else "resampled"


def _paths(nodes: Iterable[Node]) -> list[TokenPath]:
    paths: list[TokenPath] = []
    for token, parent, _ in nodes:
        paths.append((*paths[parent], token) if paths else ())
    return paths
