"""Masks on the paths of drafts are those of plain decoding, over real schemas: cfn-lint's, of resources of AWS."""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from redraft.grammar.library import compiled, grammar_tokens, library_grammar
from redraft.grammar.state import Grammar, GrammarState
from redraft.request import Guide
from tests.grammar.tokens import CODEC, GUIDES, VOCAB

END = 0
TOKENS = grammar_tokens(CODEC, VOCAB)
CLOSES = np.array([any(mark in CODEC.token_bytes(token) for mark in b'",}]') for token in range(VOCAB)])
"""Tokens that may end a string, an item or a value: without a preference for these, walks stay in their first one."""
BY_LENGTH = [
    Guide(kind="grammar", text='start: a "b" a\na[max_tokens=3]: /[ab]+/'),
    Guide(kind="grammar", text='start: a "12" a\na[stop="b"]: /[ab]*/'),
]


def real_schemas() -> Iterator[str]:
    """Texts of schemas without a keyword that many of them have and the library refuses."""
    folder = Path(str(importlib.metadata.distribution("cfn-lint").locate_file("cfnlint/data/schemas/resources")))
    for path in sorted(folder.glob("*.json")):
        text = path.read_text()
        if '"uniqueItems"' not in text:
            yield text


class Walk:
    """An answer that grows by seeded random choices, and a matcher that has never been asked about a draft."""

    def __init__(self, guide: Guide, seed: int):
        grammar = library_grammar(guide)
        certain, probe, self._plain = (compiled(TOKENS, grammar) for _ in range(3))
        self.state = Grammar(certain, probe, VOCAB).start([END])
        self._random = random.Random(seed)
        self._text: list[int] = []

    def path(self, most: int) -> tuple[int, ...]:
        """A path of up to `most` random choices, each with the tokens that are forced after it."""
        path: tuple[int, ...] = ()
        for _ in range(self._random.randint(1, most)):
            allowed = self.state.mask(path).copy()
            allowed[END] = False
            if not allowed.any():
                break
            if self._random.random() < 0.5 and (allowed & CLOSES).any():
                allowed &= CLOSES
            path = (*path, self._random.choice(np.flatnonzero(allowed).tolist()))
            path = (*path, *self.state.forced(path))
        return path

    def plain_mask(self, path: tuple[int, ...]) -> np.ndarray:
        """The mask after a path, of a new matcher that is fed the same tokens."""
        matcher = self._plain.deep_copy()
        assert matcher.consume_tokens([*self._text, *path])
        return GrammarState(Grammar(matcher, matcher, VOCAB), [END]).mask()

    def check(self, steps: int) -> None:
        """Go on by so many choices, and compare the masks of random paths after each."""
        for _ in range(steps):
            if self.state.ended:
                return
            for path in (*(self.path(4) for _ in range(3)), ()):
                assert np.array_equal(self.state.mask(path), self.plain_mask(path)), (self._text, path)
            for token in self.path(1):
                self._text.append(token)
                self.state.advance(token)


def test_every_mask_of_a_walk_is_a_new_matchers():
    """Over 200 schemas: a matcher that goes back from a draft has wrong masks in some 2% of them."""
    checked = 0
    for seed, text in enumerate(real_schemas()):
        try:
            walk = Walk(Guide(kind="json_schema", text=text), seed)
        except ValueError:
            continue  # the library refuses the schema
        walk.check(steps=12)
        checked += 1
        if checked == 200:
            break
    assert checked == 200


@pytest.mark.parametrize("guide", [*GUIDES.values(), *BY_LENGTH], ids=lambda guide: guide.text[:30] or guide.kind)
def test_every_mask_of_other_guides_is_a_new_matchers(guide):
    for seed in range(10):
        Walk(guide, seed).check(steps=12)
