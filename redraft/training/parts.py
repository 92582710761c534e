"""Parts of a distillation: folders of teacher data to train on and held out, each from its own prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redraft.console.resources import free_disk
from redraft.prompts import Prompt
from redraft.training.prompts import by_share, cutoff_of, divide, draw_prompts
from redraft.training.shards import Document, Shards

HELD_OUT_SHARE, LEAST_HELD_OUT, MOST_HELD_OUT = 0.02, 2_000, 100_000
"""Held-out tokens: a share of the training tokens within these bounds."""
HELD_OUT_SEED = 1_000_000
"""Far from the seeds of training data, which are the numbers of its shards: a model writes other prompts itself."""


@dataclass
class Part:
    """What one folder is to hold: `wanted` tokens of conversations, from its own prompts."""

    held_out: bool
    shards: Shards
    wanted: int
    prompts: list[tuple[float, list[Prompt]]]
    """Groups, each with its share; none where the target writes all prompts itself"""
    ended: list[Document] = field(default_factory=list)
    """Documents that are in no shard yet"""

    @property
    def held(self) -> int:
        """Tokens of the documents that ended."""
        return self.shards.tokens + sum(len(doc.tokens) for doc in self.ended)

    def held_with(self, under_way: Sequence[Document]) -> int:
        """Tokens that it held if its documents under way ended now: one without an answer would be dropped."""
        return self.held + sum(len(doc.tokens) for doc in under_way if doc.answered and doc.held_out == self.held_out)

    def draw(self, seed: int) -> Iterator[Prompt]:
        """Endless prompts, from the first that no run of the folder has drawn."""
        order = draw_prompts(self.prompts, seed + HELD_OUT_SEED * self.held_out)
        for prompt in itertools.islice(order, self.shards.drawn, None):
            self.shards.drawn += 1
            yield prompt

    def seed(self, seed: int) -> int:
        """A seed that no other run of the folder has."""
        return seed + self.shards.count + HELD_OUT_SEED * self.held_out

    def close(self, under_way: Sequence[Document]) -> None:
        """Write the documents that ended as a shard, and those under way beside it."""
        self.shards.add(self.ended, under_way)
        self.ended = []


def held_out_tokens(tokens: int) -> int:
    """How many held-out tokens go with so many to train on."""
    return max(LEAST_HELD_OUT, min(MOST_HELD_OUT, int(HELD_OUT_SHARE * tokens)))


def open_parts(
    path: Path | None,
    prompts: Sequence[Prompt],
    shares: Mapping[str, float],
    self_written: float,
    folders: Mapping[Path, int],
    meta: dict[str, str],
) -> list[Part]:
    """The parts of a run that fills `folders` from the prompts of a file, if there is one: to train on and, where there
    is a second folder, held out. Folders that hold shards keep their division of prompts.

    Raises ValueError for prompts or folders that do not fit.
    """
    if unknown := set(shares) - {prompt.category for prompt in prompts}:
        categories = sorted({prompt.category for prompt in prompts})
        raise ValueError(f"--shares: {path} has no source {sorted(unknown)}; it has {categories}")
    opened = [Shards(folder, meta | ({"held_out": "true"} if side else {})) for side, folder in enumerate(folders)]
    cutoffs = {shards.cutoff for shards in opened} - {None}
    if len(cutoffs) > 1:
        names = " and ".join(map(str, folders))
        raise ValueError(f"{names} do not hold out the same prompts: give folders that were written together")
    cutoff = next(iter(cutoffs), None) or cutoff_of(prompts)
    divided = [by_share(side, shares) for side in divide(prompts, cutoff)]
    filled = zip(opened, folders.values(), strict=True)
    parts = [Part(bool(side), shards, wanted, divided[side]) for side, (shards, wanted) in enumerate(filled)]
    for part in parts:
        part.shards.meta["held_out_below"] = str(cutoff)
        if not part.prompts and (self_written < 1 if not part.held_out else not self_written):
            side = "--held-out" if part.held_out else "training"
            raise ValueError(f"{path} has no prompt for {side}, which shares none with the other part: give more")
    return parts


def require_space(parts: Sequence[Part], token_bytes: int, engine: int = 0) -> None:
    """Raises ValueError where the tokens that are still to be written do not fit the disk, beside an engine of so many
    bytes."""
    output = parts[0].shards.folder
    tokens = sum(max(part.wanted, part.shards.tokens) for part in parts)
    there = sum(part.shards.tokens for part in parts)
    free = max(free_disk(output) - engine, 0)
    if (tokens - there) * token_bytes > free:
        others = tokens - parts[0].wanted
        raise ValueError(
            f"--tokens {parts[0].wanted} take {tokens * token_bytes / 1e9:.1f} GB, with those held out, of which "
            f"{there * token_bytes / 1e9:.1f} GB are there, and {output} has {free / 1e9:.1f} GB free: at most "
            f"--tokens {max(there + free // token_bytes - others, 0)} fit"
        )
