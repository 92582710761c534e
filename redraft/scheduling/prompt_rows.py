"""Shares the prompt rows of a step among the prompts that have not been through the target yet.

The shortest remaining prompt goes first, so a short one does not wait for long ones. One whose rows others wait for
counts as the shortest of these. A part of each step belongs to the
prompt that arrived first, so a long one does not starve: that part lets it through after as many steps as its rows
and those of the prompts before it take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

FIRST_PART = 4
"""One row in so many of a step is the earliest prompt's."""
SCORED_ROW = 8
"""Beside streams, a row of a scored prompt counts as this many rows: the host sums over its logits."""


class Prompt(Protocol):
    """A prompt, or what is left of it."""

    @property
    def arrived(self) -> float:
        """When it came, on any clock."""

    @property
    def to_prefill(self) -> int:
        """Rows that have not been through the target; at least 1."""

    @property
    def has_slot(self) -> bool:
        """Whether it has a slot of the cache."""

    @property
    def scored(self) -> bool:
        """Whether all its rows have logits, for log-probabilities."""


Waiting = TypeVar("Waiting", bound=Prompt)


def share_rows(
    prompts: Iterable[Waiting],
    free_slots: int,
    rows: int,
    decoding: int = 0,
    followers: Mapping[Waiting, int] | None = None,
) -> list[tuple[Waiting, int]]:
    """Which prompts take how many of the `rows` of a step in which `decoding` sequences decode, at least one each.
    Those without a slot take a free one. `followers`: by prompt, the fewest rows left to one that waits for its."""
    followers = followers or {}

    def rank(prompt: Waiting) -> tuple[int, float]:
        return min(prompt.to_prefill, followers.get(prompt, prompt.to_prefill)), prompt.arrived

    able = [prompt for prompt in prompts if prompt.has_slot or free_slots]
    if not able:
        return []
    first = min(able, key=lambda prompt: prompt.arrived)
    turns = [(first, -(-rows // FIRST_PART))]
    turns += [(prompt, rows) for prompt in sorted(able, key=rank)]
    shares: dict[int, tuple[Waiting, int]] = {}
    for prompt, most in turns:
        _, before = shares.get(id(prompt), (prompt, 0))
        price = SCORED_ROW if decoding and prompt.scored else 1
        taken = min(-(-min(most, rows) // price), prompt.to_prefill - before)
        if not taken or not (before or prompt.has_slot or free_slots):
            continue
        free_slots -= not (before or prompt.has_slot)
        shares[id(prompt)] = prompt, before + taken
        rows = max(rows - taken * price, 0)
    return list(shares.values())
