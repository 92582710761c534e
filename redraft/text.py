"""Text in and out of the engine: encoding prompts and words, and detokenizing a stream."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders

from redraft.request import MAX_MESSAGE_BYTES, PromptLimits

_REPLACEMENT = "\ufffd"
_UNFINISHED = 3
_CONTEXT_TOKENS = 6
_MOST_TOKENS = 24
_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
"""The bytes that the characters of a byte-level vocabulary stand for."""


class TextCodec:
    """A bundle's tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        # Training may leave a longest text and padding in a file. Texts stay whole here, as with transformers.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = added.keys()
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self.longest_token = _longest_token(tokenizer)
        """Bytes of the longest token: a text of n bytes has at least n / `longest_token` tokens."""
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}

    def limits(self, max_len: int) -> PromptLimits:
        """The largest prompt for a context of `max_len` tokens."""
        most = max_len - 1
        return PromptLimits(most, min(most * self.longest_token, MAX_MESSAGE_BYTES))

    @classmethod
    def load(cls, path: str | Path) -> TextCodec:
        """Read a `tokenizer.json`."""
        return cls(Tokenizer.from_file(str(path)))

    @classmethod
    def of_json(cls, text: str) -> TextCodec:
        """From the text of a `tokenizer.json`, as `json` gives it."""
        return cls(Tokenizer.from_str(text))

    def json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's own special tokens unless the text has them already."""
        (ids,) = self._encode([text])
        return ids[1:] if len(ids) > 1 and ids[0] == ids[1] and ids[0] in self._special.values() else ids

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a text's part, without special tokens."""
        (ids,) = self._encode([text], add_special_tokens=False)
        return ids

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """The token sequences that stand for words, each once: at the start of a text and after a space."""
        variants = [variant for word in words for variant in ([word] if word[0].isspace() else [word, f" {word}"])]
        return [list(ids) for ids in dict.fromkeys(map(tuple, self._encode(variants, add_special_tokens=False))) if ids]

    def _encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text. Other Python threads run meanwhile, as they do not with Tokenizer.encode."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def special_id(self, word: str) -> int | None:
        """The id of a special token given by its text, None for any other text."""
        return self._special.get(word)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a special one, which `decode` skips."""
        return token_id in self._special.values()

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids, special tokens skipped or not."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, in UTF-8, which may end within a character; a special token's own text. Empty
        for an id that the tokenizer does not know."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._byte_level:
            return bytes(_BYTES[character] for character in token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE, " ").encode()


class TextStream:
    """Text of one sequence, piece by piece: whole characters only, and nothing that may turn into a stop word.

    Tokens are decoded when their text is wanted: at each `push` where there are stop words, else at `take`. After
    `push` has returned True the sequence has met a stop word, and `take` ends with it (or before it).
    """

    def __init__(
        self,
        codec: TextCodec,
        prompt: Sequence[int] = (),
        stop_words: Sequence[str] = (),
        include_stop_word: bool = True,
        skip_special: bool = True,
    ):
        self._codec = codec
        self._stop_words = list(stop_words)
        self._include_stop_word = include_stop_word
        self._skip_special = skip_special
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._decoded = len(codec.decode(self._window, skip_special))
        self._held = ""
        self._ready: list[str] = []

    def push(self, token: int) -> bool:
        """Append a token; whether a stop word is complete."""
        self._window.append(token)
        if not self._stop_words:
            return False
        self._held += self._decode()
        return self._match()

    def take(self) -> str:
        """Text that is certain and has not been taken yet."""
        if not self._stop_words:
            self._ready.append(self._decode())
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def finish(self) -> None:
        """No more tokens come: what was held back becomes certain."""
        self._ready += [self._held, self._decode(finished=True)]
        self._held = ""

    def _decode(self, finished: bool = False) -> str:
        """The window's text after what has been decoded before, except a character that may be unfinished.

        The window's first tokens are context: how a token reads depends on those before it.
        """
        text = self._codec.decode(self._window, self._skip_special)
        end = text[-_UNFINISHED:]
        unfinished = 0 if finished else len(end) - len(end.rstrip(_REPLACEMENT))
        new = text[self._decoded : len(text) - unfinished]
        if len(self._window) > _MOST_TOKENS:
            del self._window[:-_CONTEXT_TOKENS]
            text = self._codec.decode(self._window, self._skip_special)
        self._decoded = len(text) - unfinished
        return new

    def _match(self) -> bool:
        ends = [(start + len(word), start) for word in self._stop_words if (start := self._held.find(word)) >= 0]
        if ends:
            end, start = min(ends)
            self._ready.append(self._held[: end if self._include_stop_word else start])
            self._held = ""
            self._window, self._decoded = [], 0
            return True
        keep = max(overlap(self._held, word) for word in self._stop_words)
        certain = len(self._held) - keep
        self._ready.append(self._held[:certain])
        self._held = self._held[certain:]
        return False


def overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that begins `word`."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0


def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of text that the longest token stands for, or more: a byte-level vocabulary has a character per byte.

    A normalizer that shrinks the text (NFKC, a strip of spaces) can make a token stand for more.
    """
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    return max(
        len(token) if byte_level and token not in added else len(token.encode()) for token in tokenizer.get_vocab()
    )
