"""Text streams piece by piece exactly as it decodes at once, and stops where it should."""

from __future__ import annotations

import threading
import time
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from redraft.text import TextCodec, TextStream
from tests.toy_engine import toy_codec

CODEC = toy_codec(257)
TEXT = "héllo 日本語 🙂 w!"


def stream(tokens, stop_words=(), include=True):
    texts = TextStream(CODEC, [], stop_words, include)
    pieces, stopped = [], False
    for token in tokens:
        stopped = texts.push(token)
        pieces.append(texts.take())
        if stopped:
            break
    texts.finish()
    return [*pieces, texts.take()], stopped


def test_no_text_is_cut_or_padded_as_a_file_says():
    tokenizer = Tokenizer.from_str(CODEC.json())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=90, pad_id=0)
    codec = TextCodec.of_json(tokenizer.to_str())
    assert codec.encode(TEXT) == CODEC.encode(TEXT)
    assert codec.encode_words(["a", "word"]) == CODEC.encode_words(["a", "word"])


def vocabulary(decoder, *texts: str) -> TextCodec:
    """A codec with a token for each text, for each byte in its decoder's form, and special ones."""
    parts = [*(f"<0x{byte:02X}>" for byte in range(256)), *texts]
    if isinstance(decoder, decoders.ByteLevel):
        parts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *texts]
    tokenizer = Tokenizer(models.BPE(vocab={text: token for token, text in enumerate(parts)}, merges=[]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.add_tokens([AddedToken("<tool>")])
    return TextCodec(tokenizer)


LLAMA_2 = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
PIECES = ("\u2581", "\u2581a", "b", "\ufffd", "é")
CODECS = {
    "byte-level": vocabulary(decoders.ByteLevel(), "Ġa", "ðŁ", "ĺĢb", "aðŁ"),
    "Llama 2": vocabulary(LLAMA_2, *PIECES),
    "Gemma": vocabulary(GEMMA, *PIECES),
    "fallback first": vocabulary(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), *PIECES),
    "Metaspace": vocabulary(decoders.Metaspace(), *PIECES),
    "WordPiece": vocabulary(decoders.WordPiece(), "a", "##b", ".", "é"),
    "no decoder": vocabulary(None, "a", "b"),
}


EMOJI = "🙂".encode()
COMMON = [b"\n", b" ", EMOJI[:2], EMOJI[2:], EMOJI, "é\n🙂".encode()]
WORDS = ["\n", "🙂", "🙂\n", "a", "ab", "b é", " ", "\n🙂\n"]


def byte_tokens(codec: TextCodec, data: bytes) -> list[int]:
    """The tokens of single bytes."""
    tokens = {codec.token_bytes(token): token for token in reversed(range(256))}
    return [tokens[bytes([byte])] for byte in data]


def streamed(codec: TextCodec, tokens, takes, *options) -> tuple[list[str], bool]:
    """The pieces of tokens, taken after those where `takes` says so, and whether a stop word ended them."""
    texts = TextStream(codec, *options)
    pieces, stopped = [], False
    for token, take in zip(tokens, takes, strict=True):
        stopped = texts.push(token)
        if take or stopped:
            pieces.append(texts.take())
        if stopped:
            break
    texts.finish()
    return [*pieces, texts.take()], stopped


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_of_any_vocabulary_add_up_to_the_whole(name, data):
    codec = CODECS[name]
    anything, text = st.integers(0, 256 + 12), st.integers(256, 256 + 12)
    common = [[257]]
    if name not in ("Metaspace", "WordPiece", "no decoder"):
        common = [byte_tokens(codec, part) for part in COMMON]
    parts = st.one_of(st.sampled_from(common), st.tuples(text), st.tuples(anything))
    tokens = list(chain.from_iterable(data.draw(st.lists(parts, max_size=60))))
    takes = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    skip = data.draw(st.booleans())
    whole = codec.decode(tokens, skip)

    for words in ([], ["never"]):
        pieces, _ = streamed(codec, tokens, takes, (), words, True, skip)
        assert "".join(pieces) == whole

    words = data.draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3))
    pieces, stopped = streamed(codec, tokens, takes, (), words, True, skip)
    # Whether a word is complete shows as tokens come: what later ones make of a run of bytes counts no more.
    ends = (length for length in range(1, len(tokens) + 1) if _has(codec, tokens[:length], words, skip))
    end = next(ends, None)
    assert stopped == (end is not None)
    if end is None:
        assert "".join(pieces) == whole
    else:
        text = codec.decode(tokens[:end], skip)
        places = [text.find(word) + len(word) for word in words if word in text]
        assert "".join(pieces) == text[: min(places)]


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=20, deadline=None)
@given(parts=st.lists(st.lists(st.integers(0, 256 + 12), max_size=9), max_size=9), skip=st.booleans())
def test_tokens_that_are_appended_together_read_as_those_that_are_not(name, parts, skip):
    together, apart = (TextStream(CODECS[name], skip_special=skip) for _ in range(2))
    for part in parts:
        together.extend(part)
        for token in part:
            apart.push(token)
        assert together.take() == apart.take()
    for stream in (together, apart):
        stream.finish()
    assert together.take() == apart.take()


def _has(codec: TextCodec, tokens: list[int], words: list[str], skip: bool) -> bool:
    text = codec.decode(tokens, skip)
    return any(word in text for word in words)


@pytest.mark.parametrize("name", ["Llama 2", "Gemma", "fallback first", "byte-level"])
@pytest.mark.parametrize("words", [[], ["never"]])
def test_characters_of_byte_tokens_come_whole(name, words):
    codec = CODECS[name]
    text = "\n🙂🙂é\n"
    tokens = [*byte_tokens(codec, text.encode()), 256, *byte_tokens(codec, "🙂".encode())]
    pieces, _ = streamed(codec, tokens, [True] * len(tokens), (), words)
    assert "".join(pieces) == codec.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", ["Llama 2", "Gemma"])
def test_what_is_left_out_does_not_end_a_character(name):
    codec, special, unknown = CODECS[name], 256 + len(PIECES), 999
    first, second = byte_tokens(codec, "é".encode())
    texts = TextStream(codec)
    texts.extend([first, special, unknown, second])
    texts.finish()
    assert texts.take() == codec.decode([first, second]) == "é"


@pytest.mark.parametrize("name", ["Llama 2", "Gemma", "byte-level"])
def test_a_line_feed_ends_a_text_at_once(name):
    """In Llama 2's vocabulary it is a byte token. The text need not wait for the one after it."""
    codec = CODECS[name]
    (line_feed,) = byte_tokens(codec, b"\n")
    texts = TextStream(codec, [], ["\n"], include_stop_word=False)
    assert [texts.push(token) for token in (256, 256, line_feed)] == [False, False, True]
    assert texts.take() == codec.decode([256, 256])


def test_bytes_that_are_no_text_are_not_held_back():
    codec = CODECS["Llama 2"]
    tokens = byte_tokens(codec, b"\n\xff" + 50 * b"\x80")
    pieces, _ = streamed(codec, tokens, [True] * len(tokens))
    assert pieces[:3] == ["", "\ufffd\ufffd", "\ufffd"]
    assert "".join(pieces) == codec.decode(tokens)


def test_the_context_of_a_text_is_what_was_said():
    """A space begins a word after another, not a text; tokens that are not said do not count."""
    codec = CODECS["Llama 2"]
    word, special = 257, 256 + len(PIECES)
    for prompt in ([word], [word, *[special] * 40], [word, *byte_tokens(codec, b"\n")]):
        texts = TextStream(codec, prompt)
        texts.push(word)
        assert texts.take() == " a"
    texts = TextStream(codec, [special] * 40)
    for token in (word, *[special] * 40, word):
        texts.push(token)
    assert texts.take() == "a a"


def test_a_character_that_a_prompt_began_is_finished():
    for name in ("byte-level", "Llama 2"):
        codec = CODECS[name]
        first, *rest = byte_tokens(codec, "é".encode())
        texts = TextStream(codec, [256, first])
        for token in [*rest, 256]:
            texts.push(token)
        texts.finish()
        assert texts.take() == codec.decode([256, first, *rest, 256])[len(codec.decode([256])) :]


def test_nothing_follows_a_stop_word():
    codec = CODECS["byte-level"]
    a, cut = byte_tokens(codec, b"a")[0], 256 + 3
    assert codec.token_bytes(cut) == b"a\xf0\x9f"
    texts = TextStream(codec, [], ["aa"])
    assert [texts.push(a), texts.push(cut)] == [False, True]
    texts.finish()
    assert texts.take() == "aa"


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_text_on_request_only(skip, text):
    (first,), (second,) = CODEC.encode("a"), CODEC.encode("b")
    texts = TextStream(CODEC, [0, first], skip_special=skip)
    pieces = []
    for token in (first, 0, second):
        texts.push(token)
        pieces.append(texts.take())
    assert "".join(pieces) == text


@pytest.mark.parametrize("ids", [{"a": 0, "b": 1, "c": 2}, {"a": 1, "b": 4}, {"a": 0, "b": 0, "c": 3}])
def test_unknown_ids_are_silent(ids):
    """Whether the vocabulary has a token for each id or not."""
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="a"))
    tokenizer.add_special_tokens(["<s>"])
    codec = TextCodec(tokenizer)
    for token in range(9):
        for skip in (True, False):
            said = codec.decode([token], skip)
            assert codec.is_silent(token, skip) == (not said), (token, skip)


def test_endless_invalid_bytes_do_not_pile_up():
    tokens = [CODEC.encode("🙂")[1]] * 100
    pieces, _ = stream(tokens)
    assert sum(map(bool, pieces)) > 3


@pytest.mark.parametrize(
    ("words", "include", "expected", "stops"),
    [
        (["本語"], True, "héllo 日本語", True),
        (["本語"], False, "héllo 日", True),
        (["lo w"], True, TEXT, False),
        (["🙂 w!x"], True, TEXT, False),
        (["!", "llo"], False, "hé", True),
        (["é", "hél"], True, "hé", True),
        (["llo 日", "lo"], True, "héllo", True),
    ],
)
def test_stop_words(words, include, expected, stops):
    pieces, stopped = stream(CODEC.encode(TEXT), words, include)
    assert ("".join(pieces), stopped) == (expected, stops)


def test_what_may_become_a_stop_word_is_held_back():
    pieces, _ = stream(CODEC.encode("abcabd"), ["abd"])
    assert pieces == ["", "", "abc", "", "", "abd", ""]


def test_special_tokens_are_skipped_and_bad_words_have_variants():
    assert CODEC.decode([0, *CODEC.encode("a"), 0]) == "a"
    assert CODEC.special_id("<end>") == 0
    assert CODEC.special_id("a") is None
    assert [CODEC.decode(ids) for ids in CODEC.encode_words(["ab"])] == ["ab", " ab"]
    assert [CODEC.decode(ids) for ids in CODEC.encode_words([" ab", "ab"])] == [" ab", "ab"]


def test_other_threads_run_while_a_text_is_encoded():
    """Encoding half a megabyte takes a quarter of a second, in which a worker's other requests want to go on."""
    steps, running = 0, [False]

    def encode() -> None:
        running[0] = True
        CODEC.encode("ab" * 500_000)
        running[0] = False

    thread = threading.Thread(target=encode)
    thread.start()
    while thread.is_alive():
        steps += running[0]
        time.sleep(0.0005)
    assert steps > 3


def test_no_token_has_more_bytes_than_the_longest():
    assert CODEC.longest_token == len("<end>")
    for text in (TEXT, "<end>" * 9, " " * 50):
        assert len(CODEC.encode(text)) * CODEC.longest_token >= len(text.encode()) - CODEC.longest_token
    words = Tokenizer(models.WordLevel({"日本": 0, "abc": 1}, unk_token="abc"))
    assert TextCodec(words).longest_token == len("日本".encode())


def test_the_bytes_of_tokens_add_up_to_the_text():
    """Of a byte-level vocabulary; a character may take several tokens."""
    assert b"".join(CODEC.token_bytes(token) for token in CODEC.encode(TEXT)) == TEXT.encode()
    assert CODEC.token_bytes(0) == b"<end>"
    assert CODEC.token_bytes(10**6) == b""


def test_the_bytes_of_tokens_of_another_vocabulary():
    tokens = {"\u2581a": 0, "<0xE6>": 1, "b": 2}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.decoder = LLAMA_2
    tokenizer.add_special_tokens(["<\u2581>"])
    tokenizer.add_tokens(["<0x0a>"])
    codec = TextCodec(tokenizer)
    expected = [b" a", b"\xe6", b"b", "<\u2581>".encode(), b"\n"]
    assert [codec.token_bytes(token) for token in range(5)] == expected
