"""What redraft asks of the llguidance library: a tokenizer's tokens, and guides compiled within limits."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import RepetitionNode, gbnf_to_lark

from redraft.grammar.json_schema import json_rules
from redraft.request import Guide
from redraft.text import TextCodec

_OF_A_SCHEMA = re.compile(r"at (?P<line>\d+)\(\d+\): failed to compile JSON schema: ")
_EXCERPT = re.compile(r" *(?P<line>\d+) \| (?P<rule>\w*)| *\^ *$")
ASCII_CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
"""Classes of a regex, of ASCII's digits and letters as in the `pattern` of a schema. The library means Unicode's."""
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([][])|.)", re.DOTALL)
_RULE_OF_GBNF = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
# Otherwise the converter writes ("a"?)* as "a"?*, which Lark does not read.
RepetitionNode.is_atomic = lambda self: False  # type: ignore[method-assign]
MOST_FORCED = 1000
"""Characters of a forced text that are encoded at once: more than any token has."""
LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""The library's own, under which a mask takes at most some 50 ms, with fewer states: an answer's take at most some 100
MB."""


class _Tokens:
    """A tokenizer as the library reads it. Its end token stands after the vocabulary, so that it is nobody's."""

    bos_token_id = None

    def __init__(self, codec: TextCodec, vocab_size: int, end_ids: Collection[int]):
        self.eos_token_id = vocab_size
        self.tokens = [*map(codec.token_bytes, range(vocab_size)), b"<end of the text>"]
        self._special = {token for token in range(vocab_size) if codec.is_special(token) or token in end_ids}
        self.special_token_ids = [*sorted(self._special), vocab_size]
        self._codec = codec
        self._by_bytes = {self.tokens[token]: token for token in range(vocab_size) if token not in self._special}
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, text: str) -> list[int]:
        """The usual tokens of a text's beginning, none of them special. The library asks for all that is forced, at
        every mask. It goes wrong where the tokens spell another text, or none."""
        text = text[:MOST_FORCED]
        ids, rest = list[int](), text.encode()
        for token in self._codec.encode_part(text):
            spelt = self.tokens[token] if token < self.eos_token_id else b""
            if not spelt or not rest.startswith(spelt):
                break  # the tokenizer has changed the text, or left some out
            ids += self._longest_tokens(spelt) if token in self._special else [token]
            rest = rest[len(spelt) :]
        return [*ids, *self._longest_tokens(rest)]

    def _longest_tokens(self, text: bytes) -> Iterator[int]:
        """The longest tokens that spell a text, one after the other, as far as there are any."""
        while text:
            lengths = range(min(len(text), self._longest), 0, -1)
            token = next(
                (token for length in lengths if (token := self._by_bytes.get(text[:length])) is not None), None
            )
            if token is None:
                return
            yield token
            text = text[len(self.tokens[token]) :]


def grammar_tokens(codec: TextCodec, vocab_size: int, end_ids: Collection[int] = ()) -> LLTokenizer:
    """A tokenizer's tokens, for masks of `vocab_size` bits and one more, which says that the text may end. No text is
    spelt with `end_ids`, the model's end tokens."""
    return LLTokenizer(TokenizerWrapper(_Tokens(codec, vocab_size, end_ids)))


def library_grammar(guide: Guide) -> str:
    """A guide in the library's terms. Raises ValueError, or RecursionError for one that is nested too deeply."""
    grammar = _guided_text(guide)
    if not guide.before:
        return grammar
    is_lark = not grammar.lstrip().startswith("{")
    (guided,) = [{"lark_grammar": grammar}] if is_lark else json.loads(grammar)["grammars"]
    start = f"start: before @guided\n{guide.before}"
    return json.dumps({"grammars": [{"lark_grammar": start}, guided | {"name": "guided"}]})


def _guided_text(guide: Guide) -> str:
    match guide.kind:
        case "json" | "json_schema":
            return LLMatcher.grammar_from_lark(json_rules("start", guide.text))
        case "regex":
            return LLMatcher.grammar_from_regex(_with_ascii_classes(guide.text))
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") for text in guide.choices)
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(guide.text))


def _lark(text: str) -> str:
    """A grammar of Lark's or GBNF's form in Lark's."""
    if not _RULE_OF_GBNF.search(text):
        return text
    try:
        return gbnf_to_lark(_GBNF_ESCAPE.sub(_converted_escape, text))
    except IndexError:
        raise ValueError("it ends within an escape") from None
    except RecursionError:
        raise
    except Exception as error:  # the library raises these of no kind of their own
        raise ValueError(f"it is no GBNF: {error}") from None


def _converted_escape(escape: re.Match[str]) -> str:
    """An escape of GBNF that the library's converter keeps: it strips zeros from code points, and leaves escaped
    brackets in texts, where Lark has none."""
    short, long, bracket = escape.groups()
    code = ord(bracket) if bracket else int(short or long or "D800", 16)
    if code > sys.maxunicode or 0xD800 <= code < 0xE000:  # no character, or another escape
        return escape[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _with_ascii_classes(regex: str) -> str:
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise ValueError("it ends with a backslash")  # which the library would leave out
    return re.sub(r"\\.", lambda escape: ASCII_CLASSES.get(escape[0], escape[0]), regex, flags=re.DOTALL)


def compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of a grammar. Raises ValueError where it cannot be compiled, or no answer meets it."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    probe = matcher.deep_copy()
    first = np.frombuffer(b"" if probe.is_error() else probe.compute_bitmask(), np.uint8)
    if probe.is_error():
        reason = _reason(probe.get_error().removesuffix("\n<non-verbose/>"))
        nothing = "no text meets it, or none that the model's tokens can spell"
        raise ValueError(nothing if reason == "NoExtensionBias" else reason)
    if not np.unpackbits(first, count=tokens.vocab_size - 1, bitorder="little").any():
        raise ValueError("no text but the empty one meets it")
    return matcher


def _reason(error: str) -> str:
    """What is wrong with a schema, after the name of its rule unless it is the whole grammar, without the rule itself;
    other errors as they are."""
    if (schema_error := _OF_A_SCHEMA.match(error)) is None:
        return error
    lines = error[schema_error.end() :].splitlines()
    excerpts = [excerpt for line in lines if (excerpt := _EXCERPT.match(line))]
    rule = next((excerpt["rule"] for excerpt in excerpts if excerpt["line"] == schema_error["line"]), "start")
    reason = "\n".join(line for line in lines if not _EXCERPT.match(line))
    return reason if rule == "start" else f"{rule}: {reason}"
