"""Guides compiled for a bundle's tokenizer, the last ones kept."""

from __future__ import annotations

import threading
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

from redraft.grammar.state import Grammar
from redraft.grammar.trial import Trial
from redraft.request import Guide, InvalidRequest, clipped
from redraft.text import TextCodec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

KEPT = 32
LONGEST_MESSAGE = 400


class Grammars:
    """Compiles guides for a tokenizer, and keeps the `KEPT` last used ones. Each is tried in another process first,
    since it may take any time and any memory there. Threads may share an object; one at a time compiles."""

    def __init__(self, codec: TextCodec, vocab_size: int, end_ids: Collection[int] = ()):
        """`end_ids` are the model's own end tokens, with which no text is spelt."""
        self._codec, self._vocab_size, self._end_ids = codec, vocab_size, end_ids
        self._kept: dict[tuple[str, str, str], Grammar] = {}
        self._compiling, self._changing = threading.Lock(), threading.Lock()

    def kept(self, guide: Guide) -> Grammar | None:
        """The guide's grammar, if it has been compiled, is kept, and has not failed since; it counts as used."""
        key = guide.kind, guide.text, guide.before
        with self._changing:
            found = self._kept.pop(key, None)
            if found is None or found.failed:
                return None
            self._kept[key] = found  # the last used stands last
            return found

    def compile(self, guide: Guide) -> Grammar:
        """The guide's grammar. Raises InvalidRequest for a guide that cannot be met, or not be compiled in time."""
        with self._compiling:
            if (found := self.kept(guide)) is not None:
                return found
            found = self._compiled(guide)
            with self._changing:
                self._kept[guide.kind, guide.text, guide.before] = found
                if len(self._kept) > KEPT:
                    del self._kept[next(iter(self._kept))]
            return found

    def _compiled(self, guide: Guide) -> Grammar:
        from redraft.grammar.library import compiled, library_grammar

        tokens = self._tokens
        try:
            grammar = library_grammar(guide) if guide.kind == "json" else self._trial.run(guide)
            return Grammar(compiled(tokens, grammar), compiled(tokens, grammar), self._vocab_size)
        except ValueError as error:
            reason = clipped(" ".join(str(error).split()), LONGEST_MESSAGE)
            raise InvalidRequest(f"guide.text: the {guide.kind} cannot be used: {reason}") from None

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from redraft.grammar.library import grammar_tokens

        return grammar_tokens(self._codec, self._vocab_size, self._end_ids)

    @cached_property
    def _trial(self) -> Trial:
        return Trial(self._codec, self._vocab_size)
