"""Guides with tokenizers that put a space before a text, as SentencePiece's, or strip it, and guides that spell special
tokens."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from redraft.grammar.compiler import Grammars
from redraft.grammar.state import GrammarState
from redraft.openai.structured.forms import FORMS
from redraft.openai.structured.tools import Function
from redraft.request import GenerateRequest, Guide
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Scheduler
from redraft.text import TextCodec
from tests.scheduling.test_scheduler import LIMITS, PLANS, SAMPLINGS, run
from tests.toy_engine import ToyEngine, only

SPACE = "▁"
CHARACTERS = [SPACE, *map(chr, range(0x21, 0x7F))]
PAIRS = [
    "no",
    "ye",
    "yes",
    '{"',
    '":',
    '"}',
    f"{SPACE}{{",
    f"{SPACE}no",
    f"{SPACE}ye",
    f"{SPACE}yes",
    "na",
    "me",
    "name",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
VOCABULARY = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS, *PAIRS]
END = VOCABULARY.index("</s>")
PREPEND = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
PREFIXES = {
    "Llama 2": (PREPEND, None),
    "Mistral v0.3": (None, pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)),
    "always": (None, pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=True)),
    "stripped": (normalizers.Sequence([normalizers.Strip(), PREPEND]), None),
}


def sentencepiece_codec(prefix: str) -> TextCodec:
    """Some 370 tokens: bytes, characters, and a few pairs, some of which begin with a space."""
    split = [(pair[:length], pair[length:]) for pair in PAIRS for length in range(1, len(pair))]
    merges = [halves for halves in split if set(halves) <= {*CHARACTERS, *PAIRS}]
    vocabulary = {token: place for place, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = PREFIXES[prefix]
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return TextCodec(tokenizer)


CODECS = {prefix: sentencepiece_codec(prefix) for prefix in PREFIXES}
GRAMMARS = {prefix: Grammars(codec, len(VOCABULARY), {END}) for prefix, codec in CODECS.items()}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["yes no", "né\n", "a  b"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def call(form: str, prefix: str) -> Guide:
    function = Function(name="who", parameters=PERSON)
    return FORMS[form].grammar([function], False, CODECS[prefix]).after_opening()


def is_person(text: str) -> bool:
    value = json.loads(text)
    return value["name"] in PERSON["properties"]["name"]["enum"] and value["age"] in range(10)


GUIDES = {
    "json": (Guide(kind="json"), lambda text: isinstance(json.loads(text), dict)),
    "schema": (Guide(kind="json_schema", text=json.dumps(PERSON)), is_person),
    "choice": (Guide(kind="choice", text='["yes", "no"]'), ["yes", "no"].__contains__),
    "spaces": (Guide(kind="choice", text='[" yes", "  no", "a b "]'), [" yes", "  no", "a b "].__contains__),
    "leading space": (Guide(kind="regex", text=" (yes|no)"), re.compile(" (yes|no)").fullmatch),
    "regex": (Guide(kind="regex", text="(yes|no){2}( name)?é"), re.compile("(yes|no){2}( name)?é").fullmatch),
    "GBNF": (
        Guide(kind="grammar", text='root ::= "name: " ("yes" | "no") "\\n"'),
        re.compile("name: (yes|no)\n").fullmatch,
    ),
}


def random_text(prefix: str, guide: Guide, seed: int) -> str:
    """A text of random choices among what the guide allows; each mask has a token."""
    state = GRAMMARS[prefix].compile(guide).start([END])
    tokens, rng = list[int](), random.Random(seed)
    while not state.ended and len(tokens) < 200:
        allowed = np.flatnonzero(state.mask()).tolist()
        assert allowed
        tokens.append(END if END in allowed else rng.choice(allowed))
        state.advance(tokens[-1])
    assert not state.failed
    return bytes_of(prefix, tokens).decode() if state.ended else ""


def bytes_of(prefix: str, tokens: list[int]) -> bytes:
    return b"".join(CODECS[prefix].token_bytes(token) for token in tokens if token != END)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("guide", GUIDES)
def test_every_text_meets_its_guide(prefix, guide):
    texts = [random_text(prefix, GUIDES[guide][0], seed) for seed in range(12)]
    assert any(texts)
    assert all(GUIDES[guide][1](text) for text in texts if text), texts


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("guide", GUIDES)
def test_speculation_equals_autoregressive(prefix, guide):
    def answer(plan, sampling):
        request = GenerateRequest(id="a", input_ids=[5, 9, 300], max_tokens=60, sampling=sampling, guide=wanted)
        grammar = GRAMMARS[prefix].compile(wanted)
        sequence = RequestState("a", request, request.input_ids, CODECS[prefix], frozenset({END}), grammar=grammar)
        return run(Scheduler(ToyEngine(len(VOCABULARY), slots=3), LIMITS, only(plan)), [sequence])["a"]

    wanted, is_met = GUIDES[guide]
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["top-k"]):
        expected = answer(None, sampling)
        assert expected[3] == "stop" or guide == "json"
        assert expected[3] != "stop" or is_met(bytes_of(prefix, expected[1]).decode())
        assert all(answer(PLANS[plan], sampling)[:4] == expected[:4] for plan in ("best_first", "merged"))


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("form", FORMS)
def test_forced_calls(prefix, form):
    for seed in range(6):
        text = random_text(prefix, call(form, prefix), seed)
        assert "who" in text
        assert is_person(re.search(r'\{"name": "(?!who")[^}]*\}', text)[0])


@pytest.mark.parametrize("prefix", PREFIXES)
def test_parts_and_words_have_no_space_before_them(prefix):
    codec = CODECS[prefix]
    spelt = lambda ids: [VOCABULARY[token] for token in ids]  # noqa: E731
    assert spelt(codec.encode_part(" ")) == [SPACE]
    assert spelt(codec.encode_part('name": " yes')) == ["name", '":', SPACE, '"', f"{SPACE}yes"]
    assert [spelt(ids) for ids in codec.encode_words(["no", " yes"])] == [["no"], [f"{SPACE}no"], [f"{SPACE}yes"]]
    assert spelt(codec.encode("no")) == [f"{SPACE}no"], "a prompt has its space"


SPELLING = {
    "const": Guide(kind="json_schema", text='{"const": "<|im_end|>"}'),
    "enum": Guide(kind="json_schema", text='{"enum": ["a</s>b", "<unk>"]}'),
    "name": Guide(kind="json_schema", text=json.dumps(
        {"type": "object", "properties": {"<s>": {"const": 1}}, "required": ["<s>"], "additionalProperties": False}
    )),
    "choice": Guide(kind="choice", text='["<|im_end|>", "</s>"]'),
    "regex": Guide(kind="regex", text=r"x<\|im_end\|>(</s>)+y"),
    "grammar": Guide(kind="grammar", text='start: "<s>" "<|im_end|>" "</s>"'),
}  # fmt: skip
SPELT = {
    "const": ['"<|im_end|>"'],
    "enum": ['"a</s>b"', '"<unk>"'],
    "name": ['{"<s>": 1}'],
    "choice": ["<|im_end|>", "</s>"],
    "regex": [f"x<|im_end|>{'</s>' * times}y" for times in range(1, 20)],
    "grammar": ["<s><|im_end|></s>"],
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("guide", SPELLING)
def test_a_text_that_looks_like_a_special_token_is_written_in_characters(prefix, guide):
    for seed in range(6):
        assert random_text(prefix, SPELLING[guide], seed) in SPELT[guide]
        state = GRAMMARS[prefix].compile(SPELLING[guide]).start([END])
        assert not {*range(len(SPECIAL))} & {*all_forced(state)}


def all_forced(state: GrammarState) -> list[int]:
    """What is forced of a text's beginning."""
    return [token for length in range(4) for token in state.forced(tuple(state.forced()[:length]))]


@pytest.mark.parametrize("special", [True, False])
def test_an_end_token_of_another_kind_spells_no_text(special):
    """As where tokenizer.json has the end token as an ordinary one."""
    tokenizer = Tokenizer.from_str(sentencepiece_codec("Llama 2").json())
    tokenizer.add_tokens(["<end>"]) if not special else tokenizer.add_special_tokens(["<end>"])
    codec = TextCodec(tokenizer)
    end, vocab_size = len(VOCABULARY), len(VOCABULARY) + 1
    state = Grammars(codec, vocab_size, {end}).compile(Guide(kind="choice", text='["a<end>b"]')).start([end])
    tokens = list[int]()
    while not state.ended:
        tokens.append(int(np.flatnonzero(state.mask())[0]))
        state.advance(tokens[-1])
    assert b"".join(map(codec.token_bytes, tokens)) == b"a<end>b"


def test_what_the_tokenizer_drops_at_the_end_of_a_text_is_spelt_all_the_same():
    """As BERT's normalizer drops control characters."""
    tokenizer = Tokenizer.from_str(sentencepiece_codec("Llama 2").json())
    tokenizer.normalizer = normalizers.Sequence([normalizers.BertNormalizer(clean_text=True, lowercase=False), PREPEND])
    grammars = Grammars(TextCodec(tokenizer), len(VOCABULARY), {END})
    state = grammars.compile(Guide(kind="regex", text="\x01(yes|no)")).start([END])
    assert np.flatnonzero(state.mask()).tolist() == [VOCABULARY.index("<0x01>")]
