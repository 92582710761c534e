"""Tokenizers of GGUF files, where transformers leaves out something that llama.cpp does."""

from __future__ import annotations

import string

import gguf
import pytest
from gguf import TokenType

from redraft.compiler.checkpoints.gguf_tokenizer import load
from tests.compiler.checkpoints.tiny_llama import ALPHABET

FIRST, USER, THINK, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>", "<think>", "<|end|>"
PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{i:02X}>" for i in range(256)),
    "\u2581",
    *string.printable[:94],
    "\u2581h",
    "he",
]


def tokenizer_of(path, cut, tokens, special, *, architecture="llama", merges=("h e",), **flags):
    """The tokenizer of a file with these tokens, of which some are special; SentencePiece's without a cut."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2" if cut else "llama")
    writer.add_tokenizer_pre(cut or "default")
    writer.add_token_list(tokens)
    writer.add_token_types([special.get(token, TokenType.NORMAL) for token in tokens])
    if cut:
        writer.add_token_merges(merges)
    else:
        writer.add_token_scores([-float(place) for place in range(len(tokens))])
    writer.add_bos_token_id(next(place for place, token in enumerate(tokens) if token in (FIRST, "<s>")))
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load(path, {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()})


def test_special_tokens_are_found_as_the_file_spells_them(tmp_path):
    """DeepSeek's have letters that a byte-level vocabulary has not."""
    tokens = [*ALPHABET, "he", FIRST, USER, THINK]
    special = {FIRST: TokenType.CONTROL, USER: TokenType.USER_DEFINED, THINK: TokenType.USER_DEFINED}
    found = tokenizer_of(tmp_path / "r1.gguf", "deepseek-r1-qwen", tokens, special, add_bos_token=True)
    backend = found.backend_tokenizer
    assert backend.encode(f"{USER}he{THINK}").tokens == [FIRST, USER, "he", THINK]
    assert [backend.token_to_id(token) for token in tokens] == list(range(len(tokens)))
    assert (found.bos_token_id, backend.get_vocab_size()) == (len(tokens) - 3, len(tokens))
    assert backend.decode(backend.encode(f"{USER}he").ids) == f"{USER}he"


def test_a_special_token_that_merges_make_is_one_token_all_the_same(tmp_path):
    tokens = [*ALPHABET, "he", "  ", "<s>"]
    special = {"  ": TokenType.USER_DEFINED, "<s>": TokenType.CONTROL}
    backend = tokenizer_of(
        tmp_path / "m.gguf", "qwen2", tokens, special, merges=["h e", "\u0120 \u0120"]
    ).backend_tokenizer
    assert backend.encode("he  h").tokens == ["he", "  ", "h"]


@pytest.mark.parametrize("cut", ["llama-bpe", "pixtral", "qwen2"])
def test_a_vocabulary_has_no_tokens_that_the_file_has_not(cut, tmp_path):
    found = tokenizer_of(tmp_path / "cut.gguf", cut, [*ALPHABET, "he", "<s>"], {"<s>": TokenType.CONTROL})
    assert found.backend_tokenizer.get_vocab_size() == len(ALPHABET) + 2
    assert found.backend_tokenizer.encode("<|endoftext|>").ids[-1] == ALPHABET.index(">")
    assert found.backend_tokenizer.encode("he").tokens == (["he"] if cut == "qwen2" else ["<s>", "he"])
    assert found.backend_tokenizer.model.ignore_merges == (cut != "qwen2")


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        ({}, ["<s>", "\u2581", "[", "<s>", "\u2581", "\u2581h", "e", "</s>", "\u2581", "<0x0A>", "o"]),
        ({"add_space_prefix": False}, ["<s>", "[", "<s>", "\u2581h", "e", "</s>", "<0x0A>", "o"]),
    ],
)
def test_every_text_after_a_special_token_begins_with_a_space_unless_the_file_says_otherwise(flags, texts, tmp_path):
    """As in Llama 2's own files: a text that begins with a space has two then."""
    special = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    backend = tokenizer_of(tmp_path / "pieces.gguf", None, PIECES, special, **flags).backend_tokenizer
    assert backend.encode("[<s> he</s>\no").tokens == texts
    for text in ("he", " he"):
        assert backend.decode(backend.encode(text).ids) == text


def test_special_tokens_of_phi_3_take_the_white_space_after_them(tmp_path):
    """As llama.cpp has it for files of this name; `<s>` takes none."""
    special = {"<s>": TokenType.CONTROL, END: TokenType.CONTROL}
    backend = tokenizer_of(tmp_path / "phi.gguf", None, [*PIECES, END], special, architecture="phi3").backend_tokenizer
    for text, tokens in (
        (f"{END}\nhe{END}\n", ["<s>", END, "\u2581h", "e", END]),
        ("<s>\n", ["<s>", "<s>", "\u2581", "<0x0A>"]),
    ):
        assert [backend.id_to_token(token) for token in backend.encode(text).ids] == tokens
