"""Where an answer stands in its grammar: which tokens may come next, there or after a path of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

TokenPath = tuple[int, ...]
"""Tokens after those that are certain."""
T = TypeVar("T")


@dataclass(eq=False)
class Grammar:
    """A compiled guide for a vocabulary of V tokens. Its matchers stay at the start.

    Copies of a matcher share the automaton that they build as texts need it, and a failure to build it. So the guide is
    compiled twice: `matcher` is for certain tokens, `probe` for the paths of drafts, whose failures thus end no text.
    """

    matcher: LLMatcher
    probe: LLMatcher
    vocab_size: int
    failed: bool = False
    """Whether one of the two has grown past its limits: later answers need the guide compiled anew."""

    def start(self, end_ids: Iterable[int] = ()) -> GrammarState:
        """A new answer's state; `end_ids` are the tokens that may end it where the grammar is satisfied."""
        return GrammarState(self, end_ids)


class GrammarState:
    """One answer's place in its grammar. Masks are kept until a token makes them void, so that a walk uses those that
    the tree was made with.

    `end_ids` are the tokens that may end the text where the grammar is satisfied.
    `complete_length` is how many tokens the text has once nothing but an end token may follow: it is complete, or the
    grammar has `failed`, as it has grown past its limits. Further tokens change nothing.
    """

    def __init__(self, grammar: Grammar, end_ids: Iterable[int]):
        self._grammar, self._vocab_size = grammar, grammar.vocab_size
        self._matcher = grammar.matcher.deep_copy()
        # One matcher per path, none of which ever goes back: after a rollback llguidance (1.5.1 to 1.9.1) may give a
        # mask that it kept from the tokens taken back.
        self._probes: dict[TokenPath, LLMatcher] = {(): grammar.probe.deep_copy()}
        self.end_ids = [token for token in end_ids if token < self._vocab_size]
        self._masks: dict[TokenPath, np.ndarray] = {}
        self._length = 0
        self.complete_length: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the text is complete, or was ended by an end token."""
        return self.complete_length is not None

    @property
    def failed(self) -> bool:
        """Whether the text can be neither finished nor continued by the grammar, which has grown past its limits."""
        return self._matcher.is_error()

    @property
    def past_limits(self) -> bool:
        """Whether the grammar has grown past its limits, on certain tokens or on a draft: masks may be missing."""
        return self._grammar.failed

    def mask(self, path: TokenPath = ()) -> np.ndarray:
        """Whether each token may come after a path, bool [V]: none where the path itself is forbidden or ends the
        text, or where the grammar grows past its limits on it."""
        if path not in self._masks:
            mask = self._after(path, self._allowed) if path else self._allowed(self._matcher)
            if mask is None:
                return np.zeros(self._vocab_size, bool)
            self._masks[path] = mask
        return self._masks[path]

    def advance(self, token: int) -> None:
        """Make a token of the mask certain."""
        if self.ended:
            return
        self._length += 1
        if token in self.end_ids:
            self.complete_length = self._length
            return
        self._matcher.consume_token(token)
        self._advance_probes(token)
        self._masks = {path[1:]: mask for path, mask in self._masks.items() if path[:1] == (token,)}
        allowed = self.mask()
        if np.count_nonzero(allowed) == np.count_nonzero(allowed[self.end_ids]):
            self.complete_length = self._length
            self._grammar.failed |= self.failed

    def forced(self, path: TokenPath = ()) -> list[int]:
        """The tokens that the grammar's next bytes are usually written with, where only these bytes may come after a
        path. Mostly the mask has only the first of them; they are a draft, not a choice."""
        return self._after(path, lambda matcher: matcher.compute_ff_tokens()) or []

    def _after(self, path: TokenPath, ask: Callable[[LLMatcher], T]) -> T | None:
        """What a probe answers after a path; None where the grammar does not take the path, or has failed."""
        if self._grammar.failed or (probe := self._probe(path)) is None:
            return None
        result = ask(probe)
        self._grammar.failed = probe.is_error()
        return None if self._grammar.failed else result

    def _probe(self, path: TokenPath) -> LLMatcher | None:
        """The matcher that stands after a path; None where the grammar does not take the path. It is kept, since paths
        below it begin with a copy, which costs some 5 microseconds per 100 tokens of the text."""
        if path not in self._probes:
            length = next(length for length in reversed(range(len(path))) if path[:length] in self._probes)
            probe = self._probes[path[:length]].deep_copy()
            rest = list(path[length:])
            if probe.try_consume_tokens(rest) < len(rest):
                self._grammar.failed |= probe.is_error()
                return None
            self._probes[path] = probe
        return self._probes[path]

    def _advance_probes(self, token: int) -> None:
        root = self._probes[()]
        self._probes = {path[1:]: probe for path, probe in self._probes.items() if path[:1] == (token,)}
        if () not in self._probes:
            root.consume_token(token)
            self._probes[()] = root

    def _allowed(self, matcher: LLMatcher) -> np.ndarray:
        if matcher.is_stopped():
            mask = np.zeros(self._vocab_size, bool)
        else:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(bool)
        mask[self.end_ids] = matcher.is_accepting()
        return mask
