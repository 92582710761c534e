"""The four calls: what may follow, on the path of a draft too, and what must."""

from __future__ import annotations

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from redraft.grammar.compiler import Grammars
from redraft.grammar.library import grammar_tokens
from redraft.grammar.state import Grammar
from redraft.request import Guide
from tests.grammar.tokens import CODEC, VOCAB, grammar
from tests.toy_engine import toy_codec

END = 0


def start(name: str, end_ids=(END,)):
    return grammar(name).start(end_ids)


def allowed(state, path=()) -> set[str]:
    """The texts of the tokens that may come after a path; the end token is `<end>`."""
    return {CODEC.token_bytes(token).decode() for token in np.flatnonzero(state.mask(path)).tolist()}


def tokens(*texts: str) -> tuple[int, ...]:
    """Ids of tokens given by their texts, whatever the encoding prefers."""
    known = {CODEC.token_bytes(token): token for token in range(VOCAB)}
    return tuple(known[text.encode()] for text in texts)


def test_a_mask_has_every_token_that_spells_a_beginning():
    state = start("choice")
    assert state.mask().shape == (VOCAB,)
    assert allowed(state) == {"y", "ye", "n", "no", "a", "aa"}
    assert allowed(state, tokens("y")) == {"e"}
    assert allowed(state, tokens("no")) == {"b", "n", "ne", "<end>"}
    assert allowed(state, tokens("ye", "s")) == {"<end>"}
    assert allowed(state) == {"y", "ye", "n", "no", "a", "aa"}, "a path changes nothing"


def test_nothing_comes_after_a_path_that_is_forbidden_or_ends_the_text():
    state = start("choice")
    for path in (tokens("b"), tokens("n", "b"), tokens("no", "<end>"), tokens("no", "<end>", "n"), tokens("<end>")):
        assert not allowed(state, path), path
        assert state.forced(path) == []
    assert allowed(state, tokens("n", "o")) == {"b", "n", "ne", "<end>"}


def test_certain_tokens_move_the_start_of_paths():
    state = start("choice")
    before = state.mask(tokens("n", "o"))
    state.mask(tokens("y"))
    state.advance(*tokens("n"))
    assert state.mask(tokens("o")) is before, "the masks of drafts are those of the walk"
    assert allowed(state) == {"o"}
    assert not allowed(state, tokens("y"))
    state.advance(*tokens("o"))
    assert not state.ended, "no, none, nobody"
    state.advance(*tokens("ne"))
    assert state.ended
    assert allowed(state) == {"<end>"}


def test_forced_tokens_are_those_of_the_encoding():
    state = start("schema")
    assert CODEC.decode(state.forced()) == '{"name": "'
    assert state.forced()[:2] == list(tokens('{"', "na"))
    assert allowed(state) == {'{"'}, "no other spelling"
    start_of_anne = tokens(*'{"name": "a', "n")
    assert CODEC.decode([*start_of_anne, *state.forced(start_of_anne)]) == '{"name": "anne", "age": '
    assert state.forced(tokens(*'{"name": "a')) == []


def test_a_path_past_the_limits_ends_no_text():
    """A token that is certain does, and the text has failed then."""
    regex = LLMatcher.grammar_from_regex("a(a|b)*a(a|b){12}n")
    limits = LLParserLimits(step_lexer_fuel=1, verbose_errors=False)
    known = grammar_tokens(CODEC, VOCAB)
    matcher, probe = (LLMatcher(known, regex, log_level=0, limits=limits) for _ in range(2))
    compiled = Grammar(matcher, probe, VOCAB)
    state = compiled.start([END])
    for _ in range(2):
        assert not allowed(state, tokens("a"))
        assert state.forced(tokens("a")) == []
    assert allowed(state) == {"a", "aa", "ab"}
    assert compiled.failed
    assert not state.failed
    state.advance(*tokens("a"))
    assert state.ended
    assert state.failed


def test_end_tokens_are_the_requests_where_the_grammar_is_satisfied():
    names = dict(zip("ab", CODEC.encode_part("a") + CODEC.encode_part("b"), strict=True))
    state = start("regex", (END, names["a"], 10**6))
    assert allowed(state) == {"aa", "ab", "n", "na"}, "a token that ends the text is no part of it"
    without = start("choice", ())
    for token in tokens("n", "o"):
        without.advance(token)
    assert allowed(without) == {"b", "n", "ne"}
    assert not without.ended


def test_a_text_that_no_token_can_spell_ends_there():
    """As the tokens cannot spell a new line. The encoding of what follows it is not taken for the text."""
    state = Grammars(CODEC, VOCAB).compile(Guide(kind="choice", text='["aa\\nb"]')).start([END])
    written = []
    while not state.ended:
        written.append(int(np.flatnonzero(state.mask())[0]))
        state.advance(written[-1])
    assert CODEC.decode(written) in ("a", "aa")
    assert not allowed(state)


def test_the_end_token_ends():
    state = start("choice")
    for token in tokens("n", "o", "<end>"):
        state.advance(token)
    assert state.ended


def test_answers_do_not_share_a_state():
    one, other = start("choice"), start("choice")
    one.advance(*tokens("n"))
    assert allowed(other) == {"y", "ye", "n", "no", "a", "aa"}
    assert allowed(start("choice")) == allowed(other)


@pytest.mark.parametrize("vocab_size", [111, 128, 300])
def test_a_vocabulary_may_be_larger_than_the_tokenizer(vocab_size):
    codec = toy_codec()
    state = Grammars(codec, vocab_size).compile(Guide(kind="regex", text="[ab]+")).start([END])
    mask = state.mask()
    assert mask.shape == (vocab_size,)
    assert np.flatnonzero(mask).tolist() == sorted(codec.encode_part("a") + codec.encode_part("b"))
