"""What the library makes of guides: classes of regexes, and limits that ordinary guides keep."""

from __future__ import annotations

import json

import numpy as np
import pytest

from redraft.grammar.library import compiled, grammar_tokens, library_grammar
from redraft.request import Guide
from tests.conftest import at_most
from tests.grammar.tokens import CODEC, VOCAB
from tests.toy_engine import toy_codec

BYTES = 257
TOKENS = grammar_tokens(toy_codec(BYTES), BYTES)
TOKEN_OF = {toy_codec(BYTES).token_bytes(token): token for token in range(BYTES)}


def accepts(guide: Guide, text: str) -> bool:
    matcher = compiled(TOKENS, library_grammar(guide))
    return matcher.consume_tokens([TOKEN_OF[bytes([byte])] for byte in text.encode()]) and matcher.is_accepting()


def regex_guides(regex: str) -> list[Guide]:
    """As a regex, and as a string of JSON that has it as its pattern."""
    schema = {"type": "string", "pattern": f"^(?:{regex})$"}
    return [Guide(kind="regex", text=f'"(?:{regex})"'), Guide(kind="json_schema", text=json.dumps(schema))]


@pytest.mark.parametrize(
    ("regex", "taken", "refused"),
    [
        (r"\d", "7", "٣a"),
        (r"\D", "aé٣", "7"),
        (r"\w", "a_7", "é٣-"),
        (r"\W", "é٣-", "a_7"),
        (r"\s", " \u00a0", "a"),
        (r"\S", "aé", " \u00a0"),
        (r"[\d-]", "7-", "٣"),
        (r"[^\w]", "é-", "a"),
        (r"\p{L}", "aé", "7"),
    ],
)
def test_classes_are_those_of_patterns(regex, taken, refused):
    for guide in regex_guides(regex):
        assert [accepts(guide, f'"{character}"') for character in taken] == [True] * len(taken), guide
        assert [accepts(guide, f'"{character}"') for character in refused] == [False] * len(refused), guide


def test_an_escaped_backslash_is_no_class():
    assert accepts(Guide(kind="regex", text=r"\\d\\w"), r"\d\w")
    with pytest.raises(ValueError, match="backslash"):
        accepts(Guide(kind="regex", text="a\\"), "a")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (r'"\u0041"', "A"),
        (r'"\u00e9\U0001F600\u4e00"', "é😀一"),
        (r'"\u0022\u005c\u000a\u0000"', '"\\\n\0'),
        (r'"\[\]"', "[]"),
        (r"[\u0041-\u005A]+", "AZ"),
        (r"[\u005b-\u005d]+", "[\\]"),
        (r"[\U0001F600-\U0001F64F]", "😀"),
        (r'"\\u0041\\["', r"\u0041\["),
        (r'"a" # \u000a is a line feed', "a"),
    ],
)
def test_escapes_of_gbnf_are_their_characters(rule, text):
    assert accepts(Guide(kind="grammar", text=f"root ::= {rule}"), text)


@pytest.mark.parametrize("escape", [r"\ud83d", r"\U00110000", r"\u04", r"\q"])
def test_an_escape_of_gbnf_that_is_no_character_is_refused(escape):
    with pytest.raises(ValueError, match=r"no GBNF|lexer error|hex escape"):
        accepts(Guide(kind="grammar", text=f'root ::= "{escape}"'), "a")


WORDS = "the quick brown fox jumps over the lazy dog and so on"


@pytest.mark.parametrize("words", [5, 20])
def test_a_pattern_of_words_is_followed_to_its_end(words):
    """It takes more than a quarter of the library's own fuel for a step."""
    schema = {"type": "string", "pattern": rf"^(?:\S+\s+){{0,{words - 1}}}\S+$", "maxLength": 200}
    guide = Guide(kind="json_schema", text=json.dumps(schema))
    matcher = compiled(grammar_tokens(CODEC, VOCAB), library_grammar(guide))
    text = f'"{" ".join(WORDS.split()[:words])}"'
    for character in text:
        (token,) = CODEC.encode_part(character)
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert not matcher.is_error(), matcher.get_error()
        assert mask[token]
        assert matcher.consume_token(token)
    assert matcher.is_accepting()


def test_empty_lines_of_a_grammar_take_little_time():
    with at_most(0.2):
        assert accepts(Guide(kind="grammar", text="\n" * 20_000 + 'start: "a"'), "a")


@pytest.mark.parametrize(
    ("grammar", "text", "other"),
    [
        ('root ::= ("a"?)* "b"', "aab", "ba"),
        ('root ::= ("a"{2}){3}', "a" * 6, "a" * 5),
        ('root ::= (("a"+)?)+', "aa", "b"),
        ('root ::= first\nfirst ::= "a"', "a", "b"),
        ('\n\n  root ::= "a"', "a", "b"),
        ('?start: sum\n?sum: "a" | sum "b" "a"', "aba", "ab"),
        ('!start: "a"', "a", "b"),
        ("start[max_tokens=2]: /a+/", "a", "b"),
    ],
)
def test_grammars_of_both_forms(grammar, text, other):
    guide = Guide(kind="grammar", text=grammar)
    assert accepts(guide, text)
    assert not accepts(guide, other)
