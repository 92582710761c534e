"""What was served, as drafts: the compiled store against the readable one, and both against their promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.decoding.native import NativeNgrams, NativeTextStore
from redraft.decoding.ngram import NgramIndex
from redraft.decoding.text_store import LONGEST, MOST_SEEN, TextMatch, TextStore
from tests.compiled_trees import EXAMPLES, run_mutant, run_sanitized
from tests.conftest import ROOT

TEXTS = st.lists(st.tuples(st.sampled_from([1, 2, 2**64 - 1]), st.lists(st.integers(0, 1), max_size=30)), max_size=8)
TAILS = st.lists(st.integers(0, 1), max_size=20)
STORES = pytest.mark.parametrize("kind", [TextStore, NativeTextStore])
SENTENCE = list(range(20, 60))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from([17, 23, 64, 111]), st.integers(0, 2**64 - 1), TEXTS, st.lists(TAILS, max_size=4), st.data())
def test_texts_are_stored_and_matched_alike(capacity, seed, texts, tails, data):
    """In a ring that is overwritten several times or never full, in pieces, with hashes that collide."""
    compiled, plain = NativeTextStore(capacity, seed), TextStore(capacity, seed)
    for scope, text in texts:
        cut = data.draw(st.integers(0, 30))
        for store in (compiled, plain):
            store.add(scope, text[:cut])
            store.extend(text[cut:])
        for tail in map(tuple, (*tails, text[-5:])):
            for asked, least in ((1, 1), (scope, 1), (scope, 3)):
                assert compiled.match(asked, tail, least) == plain.match(asked, tail, least)
                assert compiled.guess(asked, tail, least) == plain.guess(asked, tail, least)
        assert compiled.counts == plain.counts


@settings(max_examples=EXAMPLES, deadline=None)
@given(TEXTS, st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=6), st.data())
def test_ngrams_and_texts_guess_and_learn_alike(texts, parts, data):
    compiled, plain = NativeTextStore(64, 3), TextStore(64, 3)
    for store in (compiled, plain):
        for scope, text in texts:
            store.add(scope, text)
    least = data.draw(st.sampled_from([1, 3]))
    indices = NativeNgrams(texts=compiled, scope=2, least=least), NgramIndex(texts=plain, scope=2, least=least)
    for part in parts:
        for index in indices:
            index.extend(part)
        assert indices[0].tail == indices[1].tail
        assert indices[0].draft(6) == indices[1].draft(6)
        assert indices[0].draft(6, 0.4) == indices[1].draft(6, 0.4)
        assert compiled.counts == plain.counts


@STORES
def test_what_followed_the_longest_match_is_guessed_and_of_equal_ones_the_newest(kind):
    store = kind(500, 1)
    store.add(1, [1, 2, 3, 4, 70])
    store.add(1, [9, 2, 3, 4, 71])
    store.add(1, [9, 2, 3, 4, 71])
    assert store.match(1, (2, 3, 4)) == TextMatch(71, 3, 2)
    assert store.match(1, (1, 2, 3, 4)) == TextMatch(70, 4, 1)
    assert store.match(1, (8, 3, 4)) == TextMatch(71, 2, 2)
    assert store.match(1, (8, 3, 4), least=3) is None
    assert store.match(1, (4, 8)) is None
    store.add(1, SENTENCE)
    assert store.match(1, tuple(SENTENCE[:30])) == TextMatch(SENTENCE[30], LONGEST, 1)


@STORES
def test_nothing_of_another_scope_and_nothing_across_texts_is_guessed(kind):
    store = kind(500, 1)
    store.add(1, SENTENCE)
    assert store.match(2, tuple(SENTENCE[:8])) is None
    assert store.match(1, tuple(SENTENCE)) is None
    store.add(1, [99, 98])
    assert store.match(1, tuple(SENTENCE)) is None
    assert store.match(1, (*SENTENCE[-2:], 99)) == TextMatch(98, 1, 1)


@STORES
def test_the_oldest_tokens_are_forgotten_first(kind):
    store = kind(41, 1)
    store.add(1, SENTENCE)
    assert store.counts[0] == 40
    store.add(1, [1, 2, 3, 4])
    assert store.counts[0] == 39
    assert store.match(1, tuple(SENTENCE[:8])) is not None
    store.extend([5] * 9)
    assert store.match(1, tuple(SENTENCE[:8])) is None
    assert store.match(1, tuple(SENTENCE[20:28])) == TextMatch(SENTENCE[28], 8, 1)
    for _ in range(50):
        store.extend([5, 6, 7])
    assert store.counts[0] == 40


@pytest.mark.parametrize("kinds", [(TextStore, NgramIndex), (NativeTextStore, NativeNgrams)])
def test_chances_become_what_was_seen(kinds):
    """Of a text that goes on otherwise, time after time; until old guesses fade."""
    store, index = kinds[0](500, 1), kinds[1]
    store.add(1, SENTENCE)
    first = store.guess(1, tuple(SENTENCE[:9]))[1]
    for came, count in ((0, 40), (SENTENCE[9], 5 * MOST_SEEN)):
        for _ in range(count):
            own = index(SENTENCE[:9], texts=store, scope=1)
            own.expect()
            own.extend([came])
            own.expect()
        chance = store.guess(1, tuple(SENTENCE[:9]))[1]
        assert chance < first / 3 if came == 0 else chance > 0.98
    assert store.counts[1:] == (40 + 5 * MOST_SEEN, 5 * MOST_SEEN)


@pytest.mark.parametrize("kinds", [(TextStore, NgramIndex), (NativeTextStore, NativeNgrams)])
def test_the_likelier_guess_counts(kinds):
    store, index = kinds[0](500, 1), kinds[1]
    store.add(1, SENTENCE)
    assert index([20, 21, 22], texts=store, scope=1).draft(3)[0][0] == 23
    assert index([22, 9, 20, 21, 22], texts=store, scope=1).draft(3)[0][0] == 23
    own = index([20, 21, 22, 5] * 6 + [20, 21, 22], texts=store, scope=1)
    assert own.draft(3)[0][0] == 5
    assert index([20, 21, 22], texts=store, scope=0).draft(3) == []
    usual = np.full(64, 7, np.int32)
    assert index([20, 21, 22], usual, texts=store, scope=1).draft(1)[0][0] == 23
    assert index([9, 22], usual, texts=store, scope=1).draft(1)[0][0] == 7, "a match of one token is less likely"


def test_texts_are_given_back_as_they_were_stored():
    store = NativeTextStore(60, 1)
    for scope, text in ((5, SENTENCE), (2**64 - 1, [1, 2, 3]), (6, []), (7, range(100, 120))):
        store.add(scope, text)
    tokens, scopes = store.texts()
    expected = [*SENTENCE[6:], -1, 1, 2, 3, -1, *range(100, 120)]
    assert tokens.tolist() == expected
    assert [scope for scope, token in zip(scopes.tolist(), expected, strict=True) if token >= 0] == [
        *[5] * 34,
        *[-1] * 3,
        *[7] * 20,
    ]


def test_any_numbers_are_stored():
    rng = np.random.default_rng(0)
    store = NativeTextStore(5000, 2**64 - 1)
    text = (2**31 - 1 - rng.integers(0, 9, 20_000)).astype(np.int32)
    store.add(2**63, text)
    assert store.match(2**63, tuple(text[-100:-80].tolist())).token == text[-80]


@pytest.mark.slow
def test_no_look_up_leads_outside_the_ring(tmp_path):
    """The same properties under the address and undefined-behaviour sanitizers."""
    done = run_sanitized(tmp_path, __file__, "test")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


MUTANTS = {
    "scopes that are not looked at": ("texts.h", "place.scope == scope", "place.token >= 0", "alike"),
    "the oldest of equal matches": ("texts.h", "length > best.length)", "length >= best.length)", "alike"),
    "a table that is not looked at": ("texts.h", "table-- > 0;)", "table-- > 1;)", "alike"),
    "short matches for all": ("texts.h", " || start < least", "", "alike"),
    "a try too few": ("texts.h", "tried < rules_.tries", "tried + 1 < rules_.tries", "alike"),
    "texts that are not parted": ("texts.h", "if (length_) put(-1, 0);", "", "alike"),
    "an end that is not marked": ("texts.h", "        overwrite(-1);\n", "", "alike or forgotten"),
    "times that only grow": ("texts.h", "rules_.times()) : 1;", "rules_.times()) : match.times;", "alike"),
    "guesses that do not fade": ("texts.h", "seen_[cell] /= 2;", "", "seen"),
    "the own guess at any chance": ("growth.h", "texts->chance(other) > guess.chance", "guess.token < 0", "grown"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_compiled_code_is_found(mutant, tmp_path):
    name, *edit, tests = MUTANTS[mutant]
    file = __file__ if name == "texts.h" else str(ROOT / "tests/drafting/test_native.py")
    assert run_mutant(tmp_path, name, *edit, file, tests).returncode == 1
