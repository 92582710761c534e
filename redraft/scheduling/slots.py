"""The slots of the KV cache: whose rows each holds, and which of them a new sequence begins after.

A finished sequence's rows stay in its slot. A new sequence takes the slot with the longest common token prefix and
prefills the rest, or copies that prefix to another slot. The least recently used slot is overwritten.

A sequence of prompt A B C D E over a record of A B C X begins after 2 rows: the last common token, C, runs again. So
the target gives the state after C, which the pair (C, D) of a drafter's context needs, and a prompt that is in place
entirely has logits for its last token.

Layers with a window may keep a text's last rows only: then a sequence begins after rows near its end, or after none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from redraft.engines.features import join
from redraft.pairs import Pairs
from redraft.request_state import RequestState

COPY_ROWS = 16
"""A copy, or a prompt that waits for another's rows, saves the prefill of at least so many rows."""
SKIPPED_PAIRS = 64
"""A drafter does without the pairs of so many rows or more, where most are not known: else the target runs the rows
without pairs again. Measured by studies/cache/prefix_reuse.py --other."""
PENDING_PAIRS = 64
"""An idle slot keeps at most so many pairs that a drafter has not ingested: their features take the engine's memory,
which nobody has counted. Without a draft all of a text would be left."""
NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Limits:
    """Sizes of the KV cache and of a step. A slot has `max_len` + `max_tree` rows, and in layers with a window, the
    longest of which is `window`, the last `window_rows` of these, if that is not 0."""

    slots: int
    max_len: int
    max_tree: int
    prefill_chunk: int
    max_queue: int = 128
    window: int = 0
    window_rows: int = 0


@dataclass(eq=False)
class Slot:
    """A slot and its record: `tokens` int32 [n], whose rows are in place once the rows `commit` have been moved (see
    `RequestState`), and what each method's drafter knows of them.

    While a sequence runs here, the record is what it has prefilled; `pairs` then holds what other methods' drafters
    know.
    """

    number: int
    tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    commit: list[int] = field(default_factory=list)
    pairs: dict[str, Pairs] = field(default_factory=dict)
    salt: str | None = None
    used: int = 0
    """When it was used last; 0: it holds nothing."""
    method: str = ""
    user: RequestState | None = None
    written: int = 0
    """At most so many rows, those of trees included, have been written since it began with another text."""

    @property
    def settled(self) -> int:
        """Rows, from the first, that are in place already: a copy takes no others."""
        return len(self.tokens) - len(self.commit)

    @property
    def known(self) -> dict[str, Pairs]:
        """The pairs of every method's drafter, those of the running sequence too."""
        current = self.user.pairs if self.user is not None else None
        return self.pairs if current is None else {**self.pairs, self.method: current}

    def look(self) -> bool:
        """Bring the record of a running sequence up to date; whether it has changed."""
        if self.user is None or not self.user.request.cache_prompt:
            return False
        before = len(self.tokens), len(self.commit)
        self.tokens = self.user.prompt[: self.user.cache_length]
        self.commit = self.user.commit if self.user.to_prefill > 0 else []
        return (len(self.tokens), len(self.commit)) != before

    def rows_for(self, sequence: RequestState) -> int:
        """How many of its rows a sequence can begin after. Its drafter may lack the pairs of most of them, unless its
        drafts decide the answer."""
        if self.salt != sequence.request.cache_salt:
            return 0
        rows = _common(self.tokens, sequence.prompt) - 1
        if sequence.pairs is not None:
            known = self.known.get(sequence.method)
            paired = min(rows, known.rows if known else 0)
            if sequence.pairs.whole or rows - paired < max(SKIPPED_PAIRS, paired):
                rows = paired
        return max(rows, 0)


class Slots:
    """All slots. `copy(source, target, rows)` is the engine's; None: nothing is reused."""

    def __init__(self, limits: Limits, copy: Callable[[int, int, int], None] | None):
        self._limits, self._copy = limits, copy
        self._slots = [Slot(number) for number in range(limits.slots)]
        self._clock = 0
        self._state = 0
        """Changes with what the slots hold."""

    @property
    def free(self) -> list[Slot]:
        """The slots in which no sequence runs, the least recently used first."""
        return sorted((slot for slot in self._slots if slot.user is None), key=lambda slot: slot.used)

    def forget(self) -> None:
        """Free all slots and forget their records."""
        self._slots = [Slot(slot.number) for slot in self._slots]
        self._state += 1

    def reads(self, sequence: RequestState) -> bool:
        """Whether a sequence may begin after rows that are there. Scores of a prompt take all of its rows."""
        return self._copy is not None and sequence.request.cache_prompt and not sequence.scored

    def count_reusable(self, waiting: Iterable[RequestState]) -> None:
        """Say of sequences how many rows they would begin after, were they admitted now; a slot must be free. They are
        asked again only when the slots hold something else."""
        self._look()
        for sequence in waiting:
            if sequence.reusable_in != self._state:
                sequence.reusable, sequence.reusable_in = self._choose(sequence)[2], self._state

    def leader(self, sequence: RequestState) -> RequestState | None:
        """The sequence, if any, for which most of a prompt is about to be prefilled: its rows can be copied then."""
        if not self.reads(sequence):
            return None
        for slot in self._slots:
            leader = slot.user
            if leader is None or leader.to_prefill <= 0 or not leader.request.cache_prompt:
                continue
            if slot.salt != sequence.request.cache_salt or (
                sequence.pairs is not None and slot.method != sequence.method
            ):
                continue
            soon = _common(leader.prompt, sequence.prompt) - 1
            if soon < self._earliest(slot):
                continue
            if soon - sequence.reusable >= max(COPY_ROWS, len(sequence.prompt) - soon):
                return leader
        return None

    def admit(self, sequence: RequestState) -> None:
        """Give a sequence a slot, and what is in place there. Its rows are copied now where they are another's."""
        source, target, rows = self._choose(sequence)
        others = {name: pairs.first(rows) for name, pairs in source.known.items()} if rows else {}
        commit: list[int] = []
        if source is target:
            commit = target.commit[: max(rows - target.settled, 0)]
        elif self._copy is not None:
            self._copy(source.number, target.number, rows)
            source.used = self._now()
        target.written = self._written(source) if rows else 0
        known = others.pop(sequence.method, None)
        if sequence.pairs is None:
            known = None
        elif rows and (known is None or known.rows < rows):
            known = Pairs(skipped=rows)
        sequence.admit(target.number, rows, commit, known)
        target.user, target.method, target.salt = sequence, sequence.method, sequence.request.cache_salt
        target.tokens, target.commit = NO_TOKENS, []
        target.pairs = {name: _shortened(known) for name, known in others.items()}
        self._state += 1

    def release(self, sequence: RequestState) -> None:
        """Free a finished sequence's slot, whose rows stay for others."""
        slot = self._slots[sequence.slot]
        slot.written, slot.user = self._written(slot), None
        self._state += 1
        if self._copy is None or not sequence.request.cache_prompt:
            slot.tokens, slot.commit, slot.pairs, slot.used = NO_TOKENS, [], {}, 0
            return
        slot.tokens, slot.commit, slot.used = sequence.cached_tokens, sequence.commit, self._now()
        if sequence.pairs is not None:
            slot.pairs[slot.method] = _shortened(sequence.pairs)

    def _choose(self, sequence: RequestState) -> tuple[Slot, Slot, int]:
        """Return the slot that a sequence's first rows come from, the free slot that it takes, and how many rows it
        begins after. The first two are the same where nothing is copied."""
        free = self.free
        oldest = free[0]
        if not self.reads(sequence):
            return oldest, oldest, 0
        self._look()
        rows = {slot: self._usable(slot, slot.rows_for(sequence)) for slot in self._slots}
        # A copy reads only settled rows: those that a commit has yet to move are not in their places.
        copied = {slot: self._usable(slot, min(rows[slot], slot.settled)) for slot in self._slots}
        # Taking the best free slot overwrites the rest of its record, which another request may want, such as a chat's
        # next turn. It is worth that if the rest is short, or shorter than both what is saved and the oldest's record.
        best = max(free, key=rows.__getitem__)
        lost = len(best.tokens) - rows[best]
        in_place = best if lost <= max(COPY_ROWS, min(rows[best], len(oldest.tokens))) else oldest
        # Any slot, a running one too, can be copied from. The copy goes to the oldest: the source keeps its record.
        source = max(self._slots, key=copied.__getitem__)
        if copied[source] - rows[in_place] >= COPY_ROWS:
            return source, oldest, copied[source]
        return in_place, in_place, rows[in_place]

    def _written(self, slot: Slot) -> int:
        """See `Slot.written`, now."""
        if (user := slot.user) is None:
            return slot.written
        return max(slot.written, user.cache_length + (self._limits.max_tree if user.prefilled else 0))

    def _earliest(self, slot: Slot) -> int:
        """The fewest rows to begin after: a window of these, or all, must be among the last ones that were written."""
        written, window_rows = self._written(slot), self._limits.window_rows
        return written - (window_rows - self._limits.window + 1) if 0 < window_rows < written else 0

    def _usable(self, slot: Slot, rows: int) -> int:
        """Return `rows`, or 0 where layers with a window no longer have the rows before them."""
        return rows if rows >= self._earliest(slot) else 0

    def _look(self) -> None:
        self._state += sum(slot.look() for slot in self._slots)

    def _now(self) -> int:
        self._clock += 1
        return self._clock


def _shortened(pairs: Pairs) -> Pairs:
    """The ingested pairs and the next PENDING_PAIRS, with a copy of their features: slices would keep whole arrays."""
    kept = pairs.first(pairs.rows - len(pairs.tokens) + PENDING_PAIRS)
    kept.features = [join(kept.features)] if kept.features else []
    return kept


def _common(tokens: np.ndarray, other: np.ndarray) -> int:
    """Length of the common prefix of two arrays."""
    length = min(len(tokens), len(other))
    differ = np.flatnonzero(tokens[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
