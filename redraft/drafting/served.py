"""The texts that a service has served: whose they are, when they are stored, and how they are kept over restarts.

A text may show as drafts for another request of its scope, never as output.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from redraft.decoding.native import NativeTextStore
from redraft.decoding.text_store import LONGEST
from redraft.request import GenerateRequest
from redraft.request_state import RequestState
from redraft.whole_file import remove_stale, whole_file

AT_ONCE = 1024
"""Tokens that a step stores: they take it about 0.3 ms."""
AT_LEAST = 16
"""A step stores at least this part of the tokens that wait, one in 16, so that these never grow without end."""
SALT_BYTES = 16
VERSION = 2
EVERYBODY = 1
"""The scope of texts that nobody tells apart."""

log = logging.getLogger("redraft.texts")


@dataclass(frozen=True)
class Scopes:
    """Whose texts a request may be drafted from, as a number: 0 is its own text only."""

    by_key: bool
    """Whether each API key has a scope of its own; else all requests share one."""
    salt: bytes

    def of(self, request: GenerateRequest) -> int:
        """64 bits: EVERYBODY where all share, or else a salted hash of its key's digest and its `cache_salt`. 0 where
        it shares no prompts, or shows what it is drafted from.

        The texts that a file keeps of services which let all share are thus never drafted for one which does not.
        """
        if not request.cache_prompt or request.draft_trees:
            return 0
        if not (self.by_key or request.cache_salt):
            return EVERYBODY
        owner = repr((request.scope, request.cache_salt)).encode()
        digest = hashlib.blake2b(owner, key=self.salt, digest_size=8).digest()
        return max(int.from_bytes(digest), EVERYBODY + 1)


@dataclass(frozen=True)
class TextOptions:
    """What a service was asked to store."""

    by_key: bool
    """See `Scopes`."""
    capacity: int
    """See `TextStore`; 0: nothing is stored, and no request is drafted from another's text."""
    folder: Path | None = None
    """Where texts are kept over restarts; None: nowhere."""


class Kept(NamedTuple):
    """What a file keeps: texts back to back, the oldest first, each with its scope."""

    salt: bytes
    tokens: np.ndarray
    """int32 [N]"""
    ends: np.ndarray
    """int64 [texts]: where each text ends."""
    scopes: np.ndarray
    """int64 [texts]"""

    def texts(self) -> Iterator[tuple[int, np.ndarray]]:
        """The texts, each after its scope."""
        bounds = pairwise((0, *self.ends.tolist()))
        for scope, (start, end) in zip(self.scopes.tolist(), bounds, strict=True):
            yield scope % (1 << 64), self.tokens[start:end]

    def fits(self, vocab_size: int) -> bool:
        """Whether it has the form that it should have, and tokens of the vocabulary only."""
        salt, tokens, ends, scopes = np.frombuffer(self.salt, np.uint8), self.tokens, self.ends, self.scopes
        form = [f"{array.dtype}{array.shape}" for array in (salt, tokens, ends, scopes)]
        texts = f"int64({len(ends)},)" if ends.ndim else ""
        if form != [f"uint8({SALT_BYTES},)", f"int32({tokens.size},)", texts, texts]:
            return False
        bounds = np.array([0, *ends.tolist()])
        return bool(
            (np.diff(bounds) >= 0).all()
            and bounds[-1] == len(tokens)
            and (tokens >= 0).all()
            and (tokens < vocab_size).all()
        )


@dataclass(frozen=True)
class TextFile:
    """The file of the texts of one tokenizer, which nobody but its owner can read."""

    folder: Path
    tokenizer: str
    """sha256 of the bundle's tokenizer: tokens mean nothing to another."""
    vocab_size: int

    @property
    def path(self) -> Path:
        """Where it lies: services of several models may share a folder."""
        return self.folder / f"served.{self.tokenizer[:12]}.npz"

    def load(self) -> Kept | None:
        """Return what is kept; None where nothing is. A file that is damaged, or of another tokenizer, counts for
        nothing, which is logged. Parts that killed services have left are removed."""
        remove_stale(self.folder, f".{self.path.name}.*.partial")
        try:
            with self.path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                version, tokenizer = int(arrays["version"]), str(arrays["tokenizer"])
                salt, tokens, ends, scopes = (arrays[name] for name in ("salt", "tokens", "ends", "scopes"))
        except FileNotFoundError:
            return None
        except Exception as error:  # zipfile and numpy do not document what they raise
            log.warning("cannot read the texts of %s: %s: beginning without them", self.path, error)
            return None
        if (version, tokenizer) != (VERSION, self.tokenizer):
            log.warning("%s is of another tokenizer or version: beginning without its texts", self.path)
            return None
        kept = Kept(salt.tobytes(), tokens, ends, scopes)
        if not kept.fits(self.vocab_size):
            log.warning("%s is damaged: beginning without its texts", self.path)
            return None
        return kept

    def save(self, kept: Kept) -> None:
        """Write the file, whole or not at all. A folder that cannot be written to is logged."""
        arrays = kept._asdict() | {"salt": np.frombuffer(kept.salt, np.uint8)}
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with whole_file(self.path) as partial:
                descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(descriptor, "wb") as file:
                    np.savez(file, version=VERSION, tokenizer=self.tokenizer, **arrays)
        except OSError as error:
            log.warning("cannot keep texts in %s: %s", self.path, error.strerror)


class ServedTexts:
    """The store, and the texts that wait to be stored."""

    def __init__(self, options: TextOptions, tokenizer: str = "", vocab_size: int = 0):
        """Begin with the texts that `options.folder` keeps of this tokenizer: see `TextFile`."""
        self._file = TextFile(options.folder, tokenizer, vocab_size) if options.folder else None
        kept = self._file.load() if self._file else None
        self._salt = kept.salt if kept else os.urandom(SALT_BYTES)
        self.scopes = Scopes(options.by_key, self._salt)
        self.store = NativeTextStore(options.capacity, int.from_bytes(os.urandom(8)))
        self._waiting: deque[tuple[int, np.ndarray]] = deque()
        self._left = 0
        """Tokens that wait."""
        self._stored = 0
        """Tokens of the first that waits which are stored already."""
        self._writer: threading.Thread | None = None
        for scope, text in kept.texts() if kept else ():
            self.store.add(scope, text)

    def take(self, sequence: RequestState) -> None:
        """Have the text of a sequence that has ended stored: its answer, and of its prompt what was not cached, with
        the tokens before it that a match may have."""
        if sequence.scope and sequence.prefilled and sequence.request.store:
            text = sequence.text_tokens[max(sequence.stats.cached_tokens - LONGEST, 0) :]
            self._waiting.append((sequence.scope, text))
            self._left += len(text)

    def read(self, most: int | None = None) -> None:
        """Store up to `most` tokens of those that wait; None: what a step may, more where many wait."""
        most = max(AT_ONCE, self._left // AT_LEAST) if most is None else most
        while self._waiting and most > 0:
            scope, text = self._waiting[0]
            if not self._stored:
                self.store.begin(scope)
            part = text[self._stored : self._stored + most]
            self.store.extend(part)
            most -= len(part)
            self._stored += len(part)
            self._left -= len(part)
            if self._stored == len(text):
                self._waiting.popleft()
                self._stored = 0

    def keep(self) -> None:
        """Write the texts that are stored to the folder that keeps them, if there is one, beside what goes on."""
        if self._file is None or (self._writer is not None and self._writer.is_alive()):
            return
        self._writer = threading.Thread(target=self._write, args=self.store.texts(), name="redraft-texts")
        self._writer.start()

    def close(self) -> None:
        """Store all that wait, and write the texts as `keep` does, to the end."""
        if self._file is None:
            return
        self.read(self._left)
        if self._writer is not None:
            self._writer.join()
        self._write(*self.store.texts())

    def _write(self, tokens: np.ndarray, scopes: np.ndarray) -> None:
        assert self._file is not None
        inside = tokens >= 0
        starts = np.flatnonzero(inside & np.append(True, ~inside[:-1]))  # each text's first token
        ends = np.append(np.cumsum(inside)[starts[1:] - 1], inside.sum()) if len(starts) else np.zeros(0, np.int64)
        self._file.save(Kept(self._salt, tokens[inside], ends.astype(np.int64), scopes[starts]))
