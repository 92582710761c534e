"""Text streams piece by piece exactly as it decodes at once, and stops where it should."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

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


def test_pieces_are_whole_characters_and_add_up():
    pieces, _ = stream(CODEC.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


CHARACTERS = CODEC.encode("aé日🙂 ")


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(CHARACTERS), st.booleans()), max_size=90), st.booleans())
def test_any_bytes_taken_at_any_time_add_up(tokens, with_stop_words):
    texts = TextStream(CODEC, [], ["never"] if with_stop_words else [])
    pieces = []
    for token, take in tokens:
        texts.push(token)
        if take:
            pieces.append(texts.take())
    texts.finish()
    assert "".join([*pieces, texts.take()]) == CODEC.decode([token for token, _ in tokens])


def test_nothing_follows_a_stop_word():
    pieces = [b"a", b"b\xf0\x9f"]
    codec = SimpleNamespace(decode=lambda ids, _: b"".join(pieces[i] for i in ids).decode(errors="replace"))
    texts = TextStream(codec, [], ["b"])
    assert [texts.push(0), texts.push(1)] == [False, True]
    texts.finish()
    assert texts.take() == "ab"


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_text_on_request_only(skip, text):
    (first,), (second,) = CODEC.encode("a"), CODEC.encode("b")
    texts = TextStream(CODEC, [0, first], skip_special=skip)
    pieces = []
    for token in (first, 0, second):
        texts.push(token)
        pieces.append(texts.take())
    assert "".join(pieces) == text


def test_an_incomplete_character_comes_out_at_the_end():
    tokens = CODEC.encode("a🙂")[:-1]
    pieces, _ = stream(tokens)
    assert "".join(pieces) == CODEC.decode(tokens)


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
    tokenizer.add_special_tokens(["<\u2581>"])
    codec = TextCodec(tokenizer)
    assert [codec.token_bytes(token) for token in range(4)] == [b" a", b"\xe6", b"b", "<\u2581>".encode()]
