"""Guides compiled for a bundle's tokenizer, the last ones kept."""

from __future__ import annotations

import threading
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

from redraft.grammar.state import Grammar
from redraft.grammar.trial import TakesLonger, Trial
from redraft.request import Guide, InvalidRequest, clipped
from redraft.text import TextCodec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

KEPT = 32
LONGEST_MESSAGE = 400


class Grammars:
    """Compiles guides for a tokenizer, and keeps the `KEPT` last used ones. Each is tried in another process first,
    since it may take any time and any memory there. Threads may share an object."""

    def __init__(self, codec: TextCodec, vocab_size: int, end_ids: Collection[int] = ()):
        """`end_ids` are the model's own end tokens, with which no text is spelt."""
        self._codec, self._vocab_size, self._end_ids = codec, vocab_size, end_ids
        self._kept: dict[tuple[str, str, str], Grammar] = {}
        self._changing, self._preparing = threading.Lock(), threading.Lock()

    def cached(self, guide: Guide) -> Grammar | None:
        """The guide's grammar, if it has been compiled, is kept, and has not failed since; it counts as used."""
        key = guide.kind, guide.text, guide.before
        with self._changing:
            grammar = self._kept.pop(key, None)
            if grammar is None or grammar.failed:
                return None
            self._kept[key] = grammar  # the last used stands last
            return grammar

    def compile(self, guide: Guide, seconds: float | None = None) -> Grammar:
        """The guide's grammar. Raises InvalidRequest for a guide that cannot be met, or not be compiled in time; with
        `seconds`, TakesLonger where these were too few."""
        if (grammar := self.cached(guide)) is not None:
            return grammar
        grammar = self._compiled(guide, seconds)
        with self._changing:
            self._kept[guide.kind, guide.text, guide.before] = grammar
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return grammar

    def _compiled(self, guide: Guide, seconds: float | None) -> Grammar:
        from redraft.grammar.library import compiled, library_grammar

        try:
            with self._preparing:  # by one thread
                tokens, trial = self._tokens, None if guide == Guide(kind="json") else self._trial
            grammar = library_grammar(guide) if trial is None else trial.run(guide, seconds)
            return Grammar(compiled(tokens, grammar), compiled(tokens, grammar), self._vocab_size)
        except ValueError as error:
            if seconds is not None and isinstance(error, TakesLonger):
                raise
            reason = clipped(" ".join(str(error).split()), LONGEST_MESSAGE)
            raise InvalidRequest(f"guide.text: the {guide.kind} cannot be used: {reason}") from None

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from redraft.grammar.library import grammar_tokens

        return grammar_tokens(self._codec, self._vocab_size, self._end_ids)

    @cached_property
    def _trial(self) -> Trial:
        return Trial(self._codec, self._vocab_size)
