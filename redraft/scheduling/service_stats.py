"""What a service's operator watches: how requests ended, what they took, and what each method's drafts gained."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial

from redraft.request import SequenceStats

FINISH_REASONS = ("stop", "length", "cancelled", "timeout", "error")
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PER_TOKEN_SECONDS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)


@dataclass
class Histogram:
    """Observed values by bucket: `counts[i]` of them are at most `bounds[i]` and above the bound before; the last ones
    are above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class DraftingStats:
    """One method's drafts: steps of sequences that had one, drafted tokens, the accepted of them, and those that only a
    re-sampled draft held. Entry i of `accepted_per_pos` counts the drafts whose token at depth i + 1 was accepted."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    reused: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int, reused: int) -> None:
        """Count one draft."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.reused += reused
        self.accepted_per_pos += [0] * (accepted - len(self.accepted_per_pos))
        for place in range(accepted):
            self.accepted_per_pos[place] += 1


@dataclass
class ServiceStats:
    """Counted since the start. Times are in seconds. All but `step_gap` are of requests that have ended."""

    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    """Requests by finish reason."""
    methods: dict[str, DraftingStats] = field(default_factory=dict)
    queue: Histogram = field(default_factory=partial(Histogram, SECONDS))
    """From arrival to a slot."""
    first_token: Histogram = field(default_factory=partial(Histogram, SECONDS))
    """From arrival to the first token."""
    step_gap: Histogram = field(default_factory=partial(Histogram, PER_TOKEN_SECONDS))
    """From one output of tokens to the next."""
    per_token: Histogram = field(default_factory=partial(Histogram, PER_TOKEN_SECONDS))
    """From the first token to the last, over the tokens after the first."""
    whole: Histogram = field(default_factory=partial(Histogram, SECONDS))
    """From arrival to the last token."""

    def end(self, reason: str, stats: SequenceStats) -> None:
        """Count a request that has ended."""
        self.finished[reason] += 1
        self.queue.observe(stats.queue_ms / 1e3)
        if not stats.output_tokens:
            return
        first = stats.queue_ms + stats.prefill_ms
        self.first_token.observe(first / 1e3)
        self.whole.observe((first + stats.decode_ms) / 1e3)
        if stats.output_tokens > 1:
            self.per_token.observe(stats.decode_ms / 1e3 / (stats.output_tokens - 1))

    def draft(self, method: str, drafted: int, accepted: int, reused: int) -> None:
        """Count one sequence's draft."""
        self.methods.setdefault(method, DraftingStats()).add(drafted, accepted, reused)
