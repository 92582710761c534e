"""Tokenizers of GGUF files. transformers rebuilds them; what it leaves out of llama.cpp's rules is added here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from compiler.checkpoints.source import FetchError, load_tokenizer

MODEL, CUT, ADD_FIRST = (f"tokenizer.ggml.{name}" for name in ("model", "pre", "add_bos_token"))
BYTE_LEVEL = "gpt2"
"""The model of vocabularies of bytes, whose texts are cut into words before anything is merged"""
AS_GPT2 = ("gpt-2", "mellum")
DIGITS_APART = ("smollm", "refact", "starcoder", "minerva-7b")
"""Names of cuts as GPT-2's, where each digit is a word of its own"""
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Names of cuts where a word of the vocabulary is not merged from parts, and texts begin with the first token"""


def check(path: Path, fields: Mapping[str, Any]) -> None:
    """Raise FetchError for a file that cuts texts into words in a way that is not known."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    known = {*GGUF_PRE_TOKENIZER_SPLITS, *AS_GPT2, *DIGITS_APART}
    if fields.get(MODEL) == BYTE_LEVEL and fields.get(CUT) not in known:
        says = f"is {fields[CUT]!r}" if CUT in fields else "is missing"
        raise FetchError(
            f"{path}: {CUT}, which says how texts are cut into words, {says}; known are {', '.join(sorted(known))}. "
            "Take a file that says it, or the Hugging Face folder"
        )


def load(path: Path, fields: Mapping[str, Any]) -> Any:
    """The tokenizer of a file with these fields, as transformers loads it. Raises FetchError."""
    tokenizer = load_tokenizer(path)
    cut = fields.get(CUT) if fields.get(MODEL) == BYTE_LEVEL else None
    if cut in DIGITS_APART:
        digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    if cut in WHOLE_WORDS:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        tokenizer.add_bos_token = bool(fields.get(ADD_FIRST, True)) and tokenizer.bos_token is not None
    return tokenizer
