"""Where an answer stands in its grammar: which tokens may come next, there or after a path of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

Path = tuple[int, ...]
"""Tokens after those that are certain."""
T = TypeVar("T")


@dataclass(frozen=True)
class Grammar:
    """A compiled guide for a vocabulary of V tokens. Its matcher stays at the start."""

    matcher: LLMatcher
    vocab_size: int

    def start(self, end_ids: Iterable[int] = ()) -> GrammarState:
        """A new answer's state; `end_ids` are the tokens that may end it where the grammar is satisfied."""
        return GrammarState(self.matcher.deep_copy(), self.vocab_size, end_ids)


class GrammarState:
    """One answer's place in its grammar. Masks are kept until a token makes them void, so that a walk uses those that
    the tree was made with.

    `complete_length` is how many tokens the text has once nothing but an end token may follow: it is complete, or the
    grammar has grown past its limits. Further tokens change nothing.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_ids: Iterable[int]):
        self._matcher, self._vocab_size = matcher, vocab_size
        self._ends = [token for token in end_ids if token < vocab_size]
        self._masks: dict[Path, np.ndarray] = {}
        self._length = 0
        self.complete_length: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the text is complete, or was ended by an end token."""
        return self.complete_length is not None

    def mask(self, path: Path = ()) -> np.ndarray:
        """Whether each token may come after a path, bool [V]: none where the path itself is forbidden or ends the
        text."""
        if path not in self._masks:
            found = self._after(path, self._allowed)
            self._masks[path] = np.zeros(self._vocab_size, bool) if found is None else found
        return self._masks[path]

    def advance(self, token: int) -> None:
        """Make a token of the mask certain."""
        if self.ended:
            return
        self._length += 1
        if token in self._ends:
            self.complete_length = self._length
            return
        self._matcher.consume_token(token)
        self._masks = {path[1:]: mask for path, mask in self._masks.items() if path[:1] == (token,)}
        allowed = self.mask()
        if np.count_nonzero(allowed) == np.count_nonzero(allowed[self._ends]):
            self.complete_length = self._length

    def forced(self, path: Path = ()) -> list[int]:
        """The tokens that the grammar's next bytes are usually written with, where only these bytes may come after a
        path. Other tokens may spell the same bytes: a draft, not a choice."""
        return self._after(path, self._matcher.compute_ff_tokens) or []

    def _after(self, path: Path, ask: Callable[[], T]) -> T | None:
        """What the matcher answers after a path; None where it does not take the path. Afterwards it is back."""
        taken = self._matcher.try_consume_tokens(list(path))
        try:
            return ask() if taken == len(path) else None
        finally:
            self._matcher.rollback(taken)

    def _allowed(self) -> np.ndarray:
        if self._matcher.is_stopped():
            mask = np.zeros(self._vocab_size, bool)
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(bool)
        mask[self._ends] = self._matcher.is_accepting()
        return mask
