"""Recorded texts: what a bundle drafts at each of their tokens, and which of it the target follows.

The text of an answer does not depend on what is drafted. So one recording is enough to replay any budgets: a step that
begins at some token verifies the best nodes of the tree that is recorded there.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np

from benchmarks.budgets.simulation import Drawn
from redraft.bundle.budget_table import Budget
from redraft.decoding.token_tree import TokenTree
from redraft.drafting.groups import Group, roots_only
from redraft.drafting.method import Method
from redraft.request import GenerateRequest
from redraft.runtime import Runtime
from redraft.scheduling import scheduler

NODES = 15
"""Nodes of a tree that are kept."""
LETTERS = string.ascii_lowercase
PER_NAT = 4
"""Letters for each nat of a score: a chance is known to an eighth of it."""


@dataclass(frozen=True)
class Node:
    """A drafted node, as it is recorded."""

    score: float
    followed: bool


@dataclass(frozen=True)
class Text:
    """An answer, with the best nodes of the tree that is drafted after each of its tokens but the last, best first."""

    temperature: float
    trees: tuple[tuple[Node, ...], ...]

    def written(self) -> dict[str, Any]:
        """As JSON: a word for each tree, a letter for each node. `a` is a score of 0, each further one less by
        1/PER_NAT nats, and a capital one is followed. An empty tree is a hyphen."""
        words = ("".join(map(_letter, tree)) or "-" for tree in self.trees)
        return {"temperature": self.temperature, "trees": " ".join(words)}

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Text:
        """Inverse of `written`."""
        trees = (tuple(_node(letter) for letter in word if letter != "-") for word in entry["trees"].split(" "))
        return cls(entry["temperature"], tuple(trees))

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """`Drawn.scores` and `Drawn.followed` of all its trees: float64 [T, NODES + 1], bool [T, NODES]."""
        scores = np.full((len(self.trees), NODES + 1), -np.inf)
        scores[:, 0] = 0.0
        followed = np.zeros((len(self.trees), NODES), bool)
        for row, tree in enumerate(self.trees):
            scores[row, 1 : len(tree) + 1] = [node.score for node in tree]
            followed[row, : len(tree)] = [node.followed for node in tree]
        return scores, followed


def _letter(node: Node) -> str:
    letter = LETTERS[min(round(-PER_NAT * node.score), len(LETTERS) - 1)]
    return letter.upper() if node.followed else letter


def _node(letter: str) -> Node:
    return Node(-LETTERS.index(letter.lower()) / PER_NAT, letter.isupper())


class RecordingMethod(Method):
    """Drafts at each step as much as its configuration says, keeps the trees, and verifies nothing of them."""

    trees: ClassVar[list[TokenTree]] = []

    def _trees(self, sequences: Group, budgets: list[Budget]) -> TokenTree:
        self.trees.append(super()._trees(sequences, budgets))
        return roots_only(sequences)


def record(runtime: Runtime, requests: Iterable[GenerateRequest]) -> list[Text]:
    """Answer requests one by one, and record what their method would have drafted."""
    budgets, runtime.budgets = runtime.budgets, None
    texts = []
    with patch.object(scheduler, "start_method", RecordingMethod):
        runtime.with_methods(runtime.methods)
    for key, request in enumerate(requests):
        RecordingMethod.trees, tokens = [], list[int]()
        runtime.scheduler.submit(runtime.sequence(key, request))
        while not runtime.scheduler.idle:
            for output in runtime.scheduler.step():
                tokens += output.token_ids
        texts.append(text_of(request.sampling.temperature or 0.0, tokens, RecordingMethod.trees))
    runtime.budgets = budgets
    runtime.with_methods(runtime.methods)
    return texts


def text_of(temperature: float, tokens: Sequence[int], trees: Sequence[TokenTree]) -> Text:
    """A text from its tokens, and the tree that was drafted after each of the first, of one sequence each."""
    return Text(temperature, tuple(_recorded(tree, tokens[first:]) for first, tree in enumerate(trees, 1)))


def _recorded(tree: TokenTree, tokens: Sequence[int]) -> tuple[Node, ...]:
    """The best nodes of one tree, of which those are followed that draft these next tokens."""
    parents, drafted = tree.parents.tolist(), tree.tokens.tolist()
    path = {0: 0}
    """Depth, by node, of those that are followed."""
    for node in range(1, len(drafted)):
        depth = path.get(parents[node])
        if depth is not None and depth < len(tokens) and drafted[node] == tokens[depth]:
            path[node] = depth + 1
    ranked = 1 + np.argsort(-tree.scores[1:], kind="stable")[:NODES]
    return tuple(Node(float(tree.scores[node]), node in path) for node in ranked.tolist())


class Replay:
    """Texts that are served in turns, those of a turn at once. A `Source`."""

    def __init__(self, turns: Sequence[Sequence[Text]]):
        self._turns = [list(turn) for turn in reversed(turns)]
        self._streams = list[tuple[Text, int]]()
        """Each a text, and how many of its trees have been passed."""

    def draw(self, now: float, rng: np.random.Generator) -> Drawn | None:
        """See `Source.draw`."""
        while not self._streams:
            if not self._turns:
                return None
            self._streams = [(text, 0) for text in self._turns.pop() if text.trees]
        rows = [(text.arrays, passed) for text, passed in self._streams]
        scores = np.stack([arrays[0][passed] for arrays, passed in rows])
        followed = np.stack([arrays[1][passed] for arrays, passed in rows])
        return Drawn(scores, followed, [text.temperature for text, _ in self._streams])

    def accept(self, counts: np.ndarray) -> None:
        """See `Source.accept`."""
        moved = [
            (text, passed + count + 1) for (text, passed), count in zip(self._streams, counts.tolist(), strict=True)
        ]
        self._streams = [(text, passed) for text, passed in moved if passed < len(text.trees)]
