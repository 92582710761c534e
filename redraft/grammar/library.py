"""What redraft asks of the llguidance library: a tokenizer's tokens, and guides compiled within limits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from redraft.request import Guide
from redraft.text import TextCodec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

JSON_FORM: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line: nothing but the content is left to choose, and no answer is lost in white space. A schema may have
another form in its key `x-guidance`."""
MOST_FORCED = 1000
"""Characters of a forced text that are encoded at once: more than any token has."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""A mask takes at most some 20 ms, and an answer's states at most some 100 MB: see the library's `LLParserLimits`."""


class _Tokens:
    """A tokenizer as the library reads it. Its end token stands after the vocabulary, so that it is nobody's."""

    bos_token_id = None

    def __init__(self, codec: TextCodec, vocab_size: int):
        self.eos_token_id = vocab_size
        self.tokens = [*map(codec.token_bytes, range(vocab_size)), b"<end of the text>"]
        self.special_token_ids = [token for token in range(vocab_size) if codec.is_special(token)] + [vocab_size]
        self._codec = codec

    def __call__(self, text: str) -> list[int]:
        """The usual tokens of a text's beginning, as far as they spell it: a tokenizer may leave out or change what it
        does not know. The library asks for all that is forced, at every mask."""
        text = text[:MOST_FORCED]
        ids, rest = self._codec.encode_part(text), text.encode()
        for place, token in enumerate(ids):
            if not rest.startswith(self.tokens[token]):
                return ids[:place]
            rest = rest[len(self.tokens[token]) :]
        return ids


def grammar_tokens(codec: TextCodec, vocab_size: int) -> LLTokenizer:
    """A tokenizer's tokens, for masks of `vocab_size` bits and one more, which says that the text may end."""
    return LLTokenizer(TokenizerWrapper(_Tokens(codec, vocab_size)))


def library_grammar(guide: Guide) -> str:
    """A guide in the library's terms. Raises ValueError, or RecursionError for one that is nested too deeply."""
    match guide.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=JSON_FORM)
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(guide.text, defaults=JSON_FORM)
        case "regex":
            return LLMatcher.grammar_from_regex(guide.text)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in guide.choices)
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
        case "grammar":
            return LLMatcher.grammar_from_lark(any_to_lark(guide.text))


def compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of a grammar. Raises ValueError where it cannot be compiled, or no answer meets it."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    probe = matcher.deep_copy()
    first = np.frombuffer(b"" if probe.is_error() else probe.compute_bitmask(), np.uint8)
    if probe.is_error():
        raise ValueError(probe.get_error())
    if not np.unpackbits(first, count=tokens.vocab_size - 1, bitorder="little").any():
        raise ValueError("no text but the empty one meets it")
    return matcher
