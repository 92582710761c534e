"""Tokenizers in which a text has more than one tokenization, and guides compiled for them."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from redraft.grammar.compiler import Grammars
from redraft.grammar.state import Grammar
from redraft.request import Guide
from redraft.text import TextCodec
from tests.toy_engine import toy_tokenizer

PAIRS = ('{"', '":', "na", "me", "ab", "aa", "no", "ye", "12", '"}', ", ", "ne")
VOCAB = 111
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["anne", "aab", "bo"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GUIDES = {
    "choice": Guide(kind="choice", text='["yes", "no", "none", "nobody", "aaaa \\"b"]'),
    "regex": Guide(kind="regex", text="(ab|aab|name){2,9}[12]*"),
    "schema": Guide(kind="json_schema", text=json.dumps(SCHEMA)),
    "grammar": Guide(kind="grammar", text='start: "na" rest\nrest: "me" rest | "12" | "(" rest ")"'),
    "json": Guide(kind="json"),
}


def pair_codec() -> TextCodec:
    """Byte-level tokens of one ASCII character each, and of the `PAIRS`, which encoding prefers: 0 is `<end>`."""
    single = list(toy_tokenizer(VOCAB - len(PAIRS)).get_vocab().items())
    (written,) = ([pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(pair) for pair in PAIRS],)
    pairs = ["".join(part for part, _ in parts) for parts in written]
    vocabulary = dict(single) | {pair: VOCAB - len(PAIRS) + place for place, pair in enumerate(pairs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(pair[0], pair[1]) for pair in pairs]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["<end>"])
    return TextCodec(tokenizer)


CODEC = pair_codec()
GRAMMARS = Grammars(CODEC, VOCAB)


def grammar(name: str) -> Grammar:
    """One of the guides, compiled."""
    return GRAMMARS.compile(GUIDES[name])
