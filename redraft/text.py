"""Text in and out of the engine: encoding prompts and words, and detokenizing a stream."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from redraft.request import MAX_MESSAGE_BYTES, PromptLimits

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6
_MOST_TOKENS = 24
_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
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
        self._inner = _with_spaces_kept(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._added = added.keys()
        steps = _decoding_steps(tokenizer)
        self.byte_level = "ByteLevel" in steps
        """Whether every token stands for bytes, which may be parts of characters."""
        self.byte_fallback = "ByteFallback" in steps
        """Whether some tokens stand for single bytes: see `fallback_byte`."""
        vocabulary = tokenizer.get_vocab()
        ids = set(vocabulary.values())
        # A text that stands twice in a vocabulary has one id there, and each of its ids names it.
        ids.update(token for token in range(max(ids)) if token not in ids and tokenizer.id_to_token(token) is not None)
        # A range tells as fast as a set, and takes no memory where no id is left out, as is usual.
        self._known_ids: Container[int] = range(len(ids)) if max(ids) < len(ids) else ids
        self.longest_token = _longest_token(vocabulary, {token.content for token in added.values()}, self.byte_level)
        """Bytes of the longest token: a text of n bytes has at least n / `longest_token` tokens."""
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        self._special_ids = frozenset(self._special.values())

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

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the tokenizer's own special tokens unless the text has them already."""
        # A batch lets other Python threads run meanwhile, as Tokenizer.encode does not.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = encoding.ids
        if not add_special_tokens:
            return ids
        return ids[1:] if len(ids) > 1 and ids[0] == ids[1] and ids[0] in self._special_ids else ids

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a text that goes on with another: no special tokens and no space are put before it."""
        (ids,) = self._encode_parts([text])
        return ids

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """The token sequences that stand for words, each once: where a word follows other text, and after a space."""
        variants = [variant for word in words for variant in ([word] if word[0].isspace() else [word, f" {word}"])]
        return [list(ids) for ids in dict.fromkeys(map(tuple, self._encode_parts(variants))) if ids]

    def _encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The texts that are one token wherever they stand, and whether that is a special one."""
        return {token.content: token.special for token in self._tokenizer.get_added_tokens_decoder().values()}

    def respelled(self, texts: Mapping[str, str]) -> TextCodec:
        """A codec whose added tokens have other texts, by the old ones, and the same ids."""
        state = json.loads(self._tokenizer.to_str())
        for token in state["added_tokens"]:
            token["content"] = texts.get(token["content"], token["content"])
        model = state["model"]
        if isinstance(vocabulary := model["vocab"], dict):
            model["vocab"] = {texts.get(text, text): token for text, token in vocabulary.items()}
        else:
            model["vocab"] = [[texts.get(text, text), score] for text, score in vocabulary]
        if model.get("unk_token") is not None:
            model["unk_token"] = texts.get(model["unk_token"], model["unk_token"])
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if not texts.keys() & {*merge, "".join(merge)}]
        return TextCodec.of_json(json.dumps(state))

    def special_id(self, word: str) -> int | None:
        """The id of a special token given by its text, None for any other text."""
        return self._special.get(word)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a special one, which `decode` skips."""
        return token_id in self._special_ids

    def is_silent(self, token_id: int, skip_special: bool = True) -> bool:
        """Whether `decode` leaves a token out: a special one, if those are skipped, or an unknown id."""
        return token_id not in self._known_ids or (skip_special and token_id in self._special_ids)

    def fallback_byte(self, token_id: int) -> bytes | None:
        """The byte that a token such as `<0xE6>` stands for; None for a token that is a text. A run of such tokens
        decodes as a whole: to its characters or, if it is no UTF-8, to one U+FFFD for each token."""
        if not self.byte_fallback:
            return None
        match = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
        return bytes([int(match[1], 16)]) if match else None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids, special tokens skipped or not."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def token_string(self, token_id: int) -> str:
        """A token as the vocabulary spells it; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, in UTF-8, which may end within a character; a special token's own text. Empty
        for an id that the tokenizer does not know."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if byte := self.fallback_byte(token_id):
            return byte
        if token_id in self._added:
            return token.encode()
        if self.byte_level:
            return bytes(_BYTES[character] for character in token)
        return token.replace(_SPACE, " ").encode()


class TextStream:
    """Text of one sequence, piece by piece: the pieces add up to what `decode` makes of all tokens.

    A piece has whole characters only, and nothing that may turn into a stop word. Tokens are decoded when their text is
    wanted: at each `push` where there are stop words, else at `take`. After `push` has returned True the sequence has
    met a stop word, and `take` ends with it (or before it).
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
        self._run: list[int] = []
        """The byte tokens of a run that has not ended, whose text a later byte may still change."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        """Reads the run, to tell whether it can still become characters."""
        self._broken = False
        """Whether it cannot."""
        self._settled = ""
        """Text of runs, after that of the window before them, which nothing can change any more."""
        self._held = ""
        self._ready: list[str] = []
        self.stop_word: str | None = None
        """The one that was met."""
        self._begin(prompt)

    def push(self, token: int) -> bool:
        """Append a token; whether a stop word is complete."""
        self.extend([token])
        if not self._stop_words:
            return False
        self._held += self._decode()
        return self._match()

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, without looking for stop words."""
        codec, skip_special = self._codec, self._skip_special
        # What `decode` leaves out is left out before it decodes: bytes on both sides of it are one run.
        tokens = [token for token in tokens if not codec.is_silent(token, skip_special)]
        if not codec.byte_fallback:
            self._window += tokens
            return
        for token in tokens:
            if byte := codec.fallback_byte(token):
                self._push_byte(token, byte)
            else:
                if self._run or self._broken:
                    self._end_run()
                self._window.append(token)

    def take(self) -> str:
        """Text that is certain and has not been taken yet."""
        if not self._stop_words:
            self._ready.append(self._decode())
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def finish(self) -> None:
        """No more tokens come: what was held back becomes certain."""
        self._end_run()
        self._ready += [self._held, self._decode(finished=True)]
        self._held = ""

    def _begin(self, prompt: Sequence[int]) -> None:
        """Take a prompt's last texts, on which the reading of the next token depends: whether a space begins it. A
        character that the prompt leaves unfinished belongs to the text."""
        window: list[int] = []
        run: list[int] = []
        data = b""
        for token in reversed(prompt):
            if len(window) == _CONTEXT_TOKENS:
                break
            if self._codec.is_silent(token, self._skip_special):
                continue
            if (byte := self._codec.fallback_byte(token)) is None:
                window.append(token)
            elif not window:
                run.append(token)
                data = byte + data
        self._window = window[::-1]
        try:
            self._utf8.decode(data)
            self._run = run[: self._unfinished_bytes()][::-1]
        except UnicodeDecodeError:
            self._utf8.reset()
        text = self._decode_window()
        self._decoded = len(text) - self._unfinished_characters(text)

    def _push_byte(self, token: int, byte: bytes) -> None:
        self._run.append(token)
        if not self._broken:
            try:
                self._utf8.decode(byte)
            except UnicodeDecodeError:
                self._broken = True
        if self._broken:
            self._settle_run(_REPLACEMENT * len(self._run))

    def _end_run(self) -> None:
        if self._run:
            whole = not self._unfinished_bytes()
            self._settle_run(self._text_after(self._run) if whole else _REPLACEMENT * len(self._run))
        self._utf8.reset()
        self._broken = False

    def _unfinished_bytes(self) -> int:
        """How many bytes of the run's last character are there, if some are missing."""
        return len(self._utf8.getstate()[0])

    def _settle_run(self, text: str) -> None:
        """Take the run's tokens, whose text is now certain."""
        self._settled = self._decode() + text
        self._window = [*self._window, *self._run][-_CONTEXT_TOKENS:]
        self._decoded = len(self._decode_window())
        self._run = []

    def _text_after(self, tokens: list[int]) -> str:
        """The text that tokens add to the window's."""
        return self._codec.decode([*self._window, *tokens], self._skip_special)[len(self._decode_window()) :]

    def _decode_window(self) -> str:
        return self._codec.decode(self._window, self._skip_special)

    def _decode(self, finished: bool = False) -> str:
        """New text that is certain: that of runs, and the window's after what has been decoded before, except a
        character that may be unfinished.

        The window's first tokens are context: how a token reads depends on those before it.
        """
        text = self._decode_window()
        unfinished = 0 if finished else self._unfinished_characters(text)
        new = self._settled + text[self._decoded : len(text) - unfinished]
        self._settled = ""
        if len(self._window) > _MOST_TOKENS:
            del self._window[:-_CONTEXT_TOKENS]
            text = self._decode_window()
        self._decoded = len(text) - unfinished
        return new

    def _unfinished_characters(self, text: str) -> int:
        """1 if the last character of the window's text may lack bytes."""
        return int(self._codec.byte_level and text.endswith(_REPLACEMENT))

    def _match(self) -> bool:
        # A stop word ends the text, so that no later byte can change the run that it is found in.
        characters = self._run[: len(self._run) - self._unfinished_bytes()]
        text = self._held + (self._text_after(characters) if characters else "")
        ends = [(start + len(word), start, word) for word in self._stop_words if (start := text.find(word)) >= 0]
        if ends:
            end, start, self.stop_word = min(ends)
            self._ready.append(text[: end if self._include_stop_word else start])
            self._held, self._settled = "", ""
            self._window, self._run, self._decoded = [], [], 0
            self._utf8.reset()
            return True
        keep = max(overlap(self._held, word) for word in self._stop_words)
        if uncertain := len(text) - len(self._held):
            keep = max(keep, *(overlap(text, word) - uncertain for word in self._stop_words))
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


def _with_spaces_kept(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer that leaves the spaces at a text's ends as they are; itself, where it does so already."""
    steps = {"normalizer": tokenizer.normalizer, "pre_tokenizer": tokenizer.pre_tokenizer}
    changed = {}
    for name, step in steps.items():
        state = None if step is None else json.loads(step.__getstate__())
        if state != (plain := _keeping_spaces(state)):
            changed[name] = plain
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | changed)) if changed else tokenizer


def _keeping_spaces(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer, as JSON, that puts no space before a text and strips none; None where it does
    nothing else."""
    if step is None or step["type"] in ("Prepend", "Strip"):
        return None
    if step["type"] == "Metaspace":
        return step | {"prepend_scheme": "never"}
    if step["type"] == "ByteLevel":
        return step | {"add_prefix_space": False}
    if step["type"] == "Sequence":
        lists = {name: [_keeping_spaces(inner) for inner in steps] for name, steps in step.items() if name != "type"}
        return step | {name: [inner for inner in steps if inner] for name, steps in lists.items()}
    return step


def _decoding_steps(tokenizer: Tokenizer) -> set[str]:
    """The kinds of a tokenizer's decoders, those inside of a sequence too."""
    if tokenizer.decoder is None:
        return set()
    return set(_kinds(json.loads(tokenizer.decoder.__getstate__())))


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for inner in decoder.get("decoders", ()):
        yield from _kinds(inner)


def _longest_token(texts: Iterable[str], added: AbstractSet[str], byte_level: bool) -> int:
    """Bytes of text that the longest token stands for, or more: a byte-level vocabulary has a character per byte.

    A normalizer that shrinks the text (NFKC, a strip of spaces) can make a token stand for more.
    """
    return max(len(text) if byte_level and text not in added else len(text.encode()) for text in texts)
