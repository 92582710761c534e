"""Tokenizers of GGUF files. transformers rebuilds them; what it leaves out of llama.cpp's rules is added here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers

from redraft.chat import DEFAULT
from redraft.compiler.checkpoints.source import FetchError, load_tokenizer
from redraft.model_defs.target.bounds import shown

MODEL, CUT = "tokenizer.ggml.model", "tokenizer.ggml.pre"
TEXTS, KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
ADD_FIRST, ADD_SPACE = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"
NAMED_TEMPLATE = "tokenizer.chat_template."
"""Before the names of chat templates besides the usual one."""
BYTE_LEVEL, SENTENCES = "gpt2", "llama"
"""The model of vocabularies of bytes, whose texts are cut into words before anything is merged, and SentencePiece's"""
AS_GPT2 = ("gpt-2", "mellum")
DIGITS_APART = ("smollm", "refact", "starcoder", "minerva-7b")
"""Names of cuts as GPT-2's, where each digit is a word of its own"""
WHOLE_WORDS = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"),
    *("falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
)
"""Names of cuts where a word of the vocabulary is not merged from parts, and texts begin with the first token"""
SPACE = "\u2581"
SPECIAL = (TokenType.CONTROL, TokenType.USER_DEFINED)
PHI3 = "phi3"
"""The architecture whose special tokens take the white space after them; llama.cpp goes by the file's name"""
KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""Those that do not"""


def check(path: Path, fields: Mapping[str, Any]) -> None:
    """Raise FetchError for a file that cuts texts into words in a way that is not known, or has fields of other types
    than a tokenizer's."""
    named = ((name, str) for name in fields if name.startswith(NAMED_TEMPLATE))
    for name, kind in ((MODEL, str), (CUT, str), (TEXTS, list), (KINDS, list), *named):
        if name in fields and not isinstance(fields[name], kind):
            raise FetchError(f"{path}: {name} is {shown(fields[name])}, expected a {kind.__name__}")
    if not all(isinstance(text, str) for text in fields.get(TEXTS, ())):
        raise FetchError(f"{path}: {TEXTS} holds something else than texts")
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    splits = {*GGUF_PRE_TOKENIZER_SPLITS, *AS_GPT2, *DIGITS_APART}
    if fields.get(MODEL) == BYTE_LEVEL and fields.get(CUT) not in splits:
        says = f"is {shown(fields[CUT])}" if CUT in fields else "is missing"
        raise FetchError(
            f"{path}: {CUT}, which says how texts are cut into words, {says}; known are {', '.join(sorted(splits))}. "
            "Take a file that says it, or the Hugging Face folder"
        )


def load(path: Path, fields: Mapping[str, Any]) -> Any:
    """The tokenizer of a file with these fields, as transformers loads it. Raises FetchError."""
    tokenizer, model, cut = load_tokenizer(path), fields.get(MODEL), fields.get(CUT)
    if model == BYTE_LEVEL:
        backend = tokenizer._tokenizer = _with_special_tokens(tokenizer.backend_tokenizer, fields)
        if cut in DIGITS_APART:
            digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        backend.model.ignore_merges = cut in WHOLE_WORDS
        first = fields.get(ADD_FIRST, cut in WHOLE_WORDS)
        tokenizer.add_bos_token = bool(first) and tokenizer.bos_token is not None
    elif model == SENTENCES and fields["general.architecture"] == PHI3:
        tokenizer._tokenizer = _stripping(tokenizer.backend_tokenizer)
    elif model == SENTENCES and isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.Metaspace):
        _set_spaces(tokenizer.backend_tokenizer, bool(fields.get(ADD_SPACE, True)))
    prefix = NAMED_TEMPLATE
    if named := {name.removeprefix(prefix): text for name, text in fields.items() if name.startswith(prefix)}:
        usual = {} if tokenizer.chat_template is None else {DEFAULT: tokenizer.chat_template}
        tokenizer.chat_template = named | usual
    return tokenizer


def _with_special_tokens(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> Tokenizer:
    """A byte-level tokenizer with the file's special tokens, as they are written in texts, and no others.

    transformers spells the bytes of DeepSeek's `<\uff5cUser\uff5c>`, which no text has, and adds GPT-2's
    `<|endoftext|>` to vocabularies without it."""
    texts, kinds = fields[TEXTS], fields.get(KINDS, ())
    special = [
        (token, text, kind) for token, (text, kind) in enumerate(zip(texts, kinds, strict=False)) if kind in SPECIAL
    ]
    lost = [(token, text) for token, text, _ in special if tokenizer.id_to_token(token) != text]
    if not lost and max(tokenizer.get_added_tokens_decoder(), default=0) < len(texts):
        return tokenizer
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < len(texts)]
    spelled = {tokenizer.id_to_token(token) for token, _ in lost}
    model = state["model"]
    model["vocab"] = {text: token for text, token in model["vocab"].items() if text not in spelled}
    model["vocab"] |= {text: token for token, text in lost}
    model["merges"] = [merge for merge in model["merges"] if not spelled & {*merge, "".join(merge)}]
    copy = Tokenizer.from_str(json.dumps(state))
    copy.add_tokens(
        [AddedToken(text, normalized=False, special=kind == TokenType.CONTROL) for _, text, kind in special]
    )
    return copy


def _stripping(tokenizer: Tokenizer) -> Tokenizer:
    """Phi-3's tokenizer, whose special tokens take the white space after them. Files do not say so."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["rstrip"] = token["content"] not in KEEP_SPACE
    return Tokenizer.from_str(json.dumps(state))


def _set_spaces(tokenizer: Tokenizer, added: bool) -> None:
    """Begin every text that follows a special token with one more space, or none. transformers adds one to the first
    text only."""
    if added:
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        return
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
