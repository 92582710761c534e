"""The answers that a service stores to learn from: which, for how long, and the thread that writes them.

The scheduler's thread hands over an answer that has ended and goes on; all else happens in the writer's thread. A shard
is closed after SHARD_S, or when it holds SHARD_ANSWERS or SHARD_BYTES. A killed worker loses what is not in a shard.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from redraft.bundle.config import BundleConfig
from redraft.bundle.manifest import Manifest
from redraft.errors import BundleError
from redraft.learning.policy import Policy
from redraft.learning.recording import Recording
from redraft.learning.shard_file import (
    FINGERPRINT,
    PARTIALS,
    SERVED,
    SHARDS,
    SOURCE,
    add_shard,
    is_of_others,
    prompt_hash,
    shard_bytes,
)
from redraft.request import GenerateRequest
from redraft.whole_file import OF_SAFETENSORS, remove_stale

SHARD_S, SHARD_ANSWERS, SHARD_BYTES = 60.0, 128, 32_000_000
QUEUED_BYTES = 256_000_000
"""Features of answers that may wait for the writer; an answer beyond them is dropped, and counted."""
FEWEST_TOKENS = 8
"""Shorter answers teach too little."""
DAY_S, GB = 86_400.0, 1_000_000_000
UNFINISHED_DAYS = 7.0
"""How much longer than others the answers stay which a generation was begun with: its training may take some nights."""
READ_HIDDEN = frozenset({"recurrent", "hidden_state", "eagle", "medusa"})
"""Kinds of drafters that read the target's hidden states. What enters layers a bundle gives as its drafter fuses it,
which no other drafter can be trained on."""

log = logging.getLogger("redraft.learning")


def why_nothing_to_learn(bundle: Path) -> str | None:
    """Why no drafter can learn from the answers of a bundle; None where one can. Raises BundleError."""
    manifest, config = Manifest.read(bundle), BundleConfig.read(bundle)
    kinds = {method.drafter for method in config.methods.values()} - {None}
    if kinds & READ_HIDDEN or (manifest.built_from and "--features" in manifest.built_from.options):
        return None
    return f"{bundle} does not give the target's hidden states, which drafters learn from: build it with --features"


def why_not_stored(folder: Path) -> str | None:
    """Why answers cannot be stored in a folder; None where they can. Raises OSError."""
    others = (path for path, _ in _found(folder.glob(SHARDS)) if is_of_others(path))
    return next((f"{path.name} in it is no shard of served answers: name another folder" for path in others), None)


@dataclass(frozen=True)
class Answer:
    """An answer that has ended."""

    recording: Recording
    prompt: np.ndarray
    """Token ids int32 [n]"""
    tokens: np.ndarray
    """Token ids int32 [n] of the whole answer, whose recording may have only the first"""


class AnswerStore:
    """Stores the answers of one worker."""

    def __init__(
        self,
        policy: Policy,
        hidden_size: int,
        fingerprint: str,
        decode: Callable[[Sequence[int]], str],
        name: str = "",
    ):
        """Features are cut to their first `hidden_size` columns, the hidden states. `fingerprint` tells the target from
        others, `name` is its bundle's; `decode` gives the text of token ids."""
        self._policy, self.hidden_size, self._decode = policy, hidden_size, decode
        self._metadata = {SOURCE: SERVED, "model": name, FINGERPRINT: fingerprint}
        self.count: Callable[[str], None] = lambda outcome: None
        """Told what became of each answer, from both threads."""
        self._queue: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._queued_bytes, self._lock = 0, threading.Lock()
        self._failed = False
        self._thread = threading.Thread(target=self._write, name="redraft-learn", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, policy: Policy, bundle: Path, decode: Callable[[Sequence[int]], str]) -> AnswerStore:
        """Store the answers of a bundle. Raises BundleError where nothing can be learned from them."""
        if why := why_nothing_to_learn(bundle):
            raise BundleError(why)
        config = BundleConfig.read(bundle)
        return cls(policy, config.target.hidden_size, Manifest.read(bundle).target_fingerprint, decode, config.name)

    def takes(self, request: GenerateRequest) -> bool:
        """Whether a request's answer is to be recorded."""
        if not request.store:
            self.count("opted_out")
            return False
        return random.random() < self._policy.share

    def put(self, answer: Answer) -> None:
        """Hand over an answer, without waiting."""
        size = answer.recording.nbytes
        with self._lock:
            fits = self._queued_bytes + size <= QUEUED_BYTES
            self._queued_bytes += size if fits else 0
        if fits:
            self._queue.put(answer)
        else:
            self.count("dropped")

    def close(self) -> None:
        """Write what has been handed over, and end."""
        self._queue.put(None)
        self._thread.join()

    def _write(self) -> None:
        pending: list[tuple[np.ndarray, np.ndarray, int]] = []
        closes = time.monotonic() + SHARD_S
        self._sweep()
        while True:
            item = None
            with suppress(queue.Empty):
                item = self._queue.get(timeout=max(closes - time.monotonic(), 0.01))
                if item is None:
                    self._close_shard(pending)
                    return
            if item is not None:
                size = item.recording.nbytes
                try:
                    pending += self._kept(item)
                except Exception:
                    log.exception("an answer could not be stored")
                    self.count("failed")
                with self._lock:
                    self._queued_bytes -= size
            size = sum(features.nbytes for _, features, _ in pending)
            if len(pending) >= SHARD_ANSWERS or size >= SHARD_BYTES or time.monotonic() >= closes:
                self._close_shard(pending)
                pending, closes = [], time.monotonic() + SHARD_S

    def _kept(self, answer: Answer) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """The answer's tokens, the bits of its features, and its prompt's hash; nothing where it is not stored."""
        tokens = answer.recording.tokens
        if len(tokens) < FEWEST_TOKENS:
            self.count("short")
            return []
        texts = (answer.prompt.tolist(), answer.tokens.tolist()) if self._policy.redacted else ()
        if any(pattern.search(self._decode(ids)) for ids in texts for pattern in self._policy.redacted):
            self.count("redacted")
            return []
        return [(np.array(tokens, np.int32), answer.recording.bits(), prompt_hash(answer.prompt.tolist()))]

    def _close_shard(self, answers: Sequence[tuple[np.ndarray, np.ndarray, int]]) -> None:
        """Write a shard. Where that fails, its answers are lost: it is logged, once until it succeeds again."""
        if answers:
            try:
                self._policy.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                tokens, features, prompts = zip(*answers, strict=True)
                add_shard(self._policy.folder, shard_bytes(tokens, features, prompts, self._metadata))
                outcome, self._failed = "stored", False
            except Exception as error:  # whatever it is, the thread goes on, for which `close` waits
                if not self._failed:
                    why = error.strerror if isinstance(error, OSError) else repr(error)
                    log.error("cannot store answers in %s: %s; serving goes on", self._policy.folder, why)
                outcome, self._failed = "failed", True
            for _ in answers:
                self.count(outcome)
        self._sweep()

    def _sweep(self) -> None:
        """Remove what is too old, and then the oldest until the folder is small enough."""
        try:
            remove_old(self._policy.folder, self._policy.days, self._policy.gigabytes)
        except OSError as error:
            log.error("cannot remove old answers in %s: %s", self._policy.folder, error.strerror)


def remove_old(folder: Path, days: float, gigabytes: float, now: float | None = None) -> None:
    """Remove the shards of a folder that are older than `days`, then the oldest until they take `gigabytes` at most. An
    unfinished generation keeps its own, which may be the same files, for UNFINISHED_DAYS longer. Shards that no service
    stored stay, and do not count. Raises OSError."""
    oldest = (time.time() if now is None else now) - days * DAY_S
    shards = sorted((stat.st_mtime, path, stat.st_size) for path, stat in _found(folder.glob(SHARDS)))
    if shards and (shards[0][0] < oldest or sum(size for *_, size in shards) > gigabytes * GB):
        shards = [shard for shard in shards if not is_of_others(shard[1])]
        excess = sum(size for *_, size in shards) - gigabytes * GB
        for modified, path, size in shards:
            if modified >= oldest and excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size
    for path, stat in _found(folder.glob(f"generations/*/*/{SHARDS}")):
        if stat.st_mtime < oldest - UNFINISHED_DAYS * DAY_S:
            path.unlink(missing_ok=True)
    remove_stale(folder, PARTIALS)
    remove_stale(folder, f"generations/*/*/{OF_SAFETENSORS}")


def _found(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Files, and what the system says of each, but those that another worker of the same folder has removed."""
    for path in paths:
        with suppress(FileNotFoundError):
            yield path, path.stat()
