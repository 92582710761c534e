"""Parts of a distillation: folders of teacher data to train on and held out, each from its own prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from redraft.console.progress import size
from redraft.console.resources import free_disk
from redraft.prompts import Prompt
from redraft.training.prompts import by_share, cutoff_of, divide, draw_prompts, rank_of
from redraft.training.ranks import ALONE, Ranks
from redraft.training.shards import Document, Shards

HELD_OUT_SHARE, LEAST_HELD_OUT, MOST_HELD_OUT = 0.02, 2_000, 100_000
"""Held-out tokens: a share of the training tokens within these bounds."""


@dataclass
class Part:
    """What one folder is to hold: `wanted` tokens of conversations, from its own prompts."""

    held_out: bool
    shards: Shards
    wanted: int
    prompts: list[tuple[float, list[Prompt]]]
    """Groups of this rank's prompts, each with its share; none where the target writes all prompts itself"""
    distinct: int = 0
    """Distinct prompts, of all ranks"""
    writers: int = 1
    """Ranks that have a prompt of this part, or have the target write them"""
    writes: bool = True
    """Whether this rank is one of them"""
    ended: list[Document] = field(default_factory=list)
    """Documents that are in no shard yet"""

    @property
    def held(self) -> int:
        """Tokens of the documents that ended."""
        return self.shards.tokens + sum(len(doc.tokens) for doc in self.ended)

    def held_with(self, under_way: Sequence[Document]) -> int:
        """Tokens that it held if its documents under way ended now: one without an answer would be dropped."""
        return self.held + sum(len(doc.tokens) for doc in under_way if doc.answered and doc.held_out == self.held_out)

    def take_share(self) -> None:
        """Want only this rank's share of the tokens that are missing."""
        missing = max(self.wanted - self.held, 0)
        self.wanted = self.held + (math.ceil(missing / self.writers) if self.writes else 0)

    def draw(self, seed: int, encode: Callable[[str], list[int]]) -> Iterator[Prompt]:
        """Endless prompts, without those that the folder holds documents of, each as often as it does."""
        answered = self.shards.answered.copy()
        for prompt in draw_prompts(self.prompts, self.seed(seed, 0)):
            if answered and answered[key := hash(tuple(encode(prompt.turns[0])))] > 0:
                answered[key] -= 1
                continue
            yield prompt

    def seed(self, seed: int, number: int | None = None) -> int:
        """A seed that no other run of this folder or of another has: of the number of its first shard, or of
        another."""
        number = self.shards.number if number is None else number
        digest = sha256(f"{seed} {number} {self.held_out}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1  # random.Random and torch take 63 bits

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
    ranks: Ranks = ALONE,
) -> list[Part]:
    """The parts of a run that fills `folders` from the prompts of a file, if there is one: to train on and, where there
    is a second folder, held out. Folders that hold shards keep their division of prompts. A prompt's hash says which
    rank takes it.

    Raises ValueError for prompts or folders that do not fit.
    """
    if unknown := set(shares) - {prompt.category for prompt in prompts}:
        categories = sorted({prompt.category for prompt in prompts})
        raise ValueError(f"--shares: {path} has no source {sorted(unknown)}; it has {categories}")
    opened = [
        Shards(folder, meta | ({"held_out": "true"} if side else {}), ranks) for side, folder in enumerate(folders)
    ]
    cutoffs = {shards.cutoff for shards in opened} - {None}
    if len(cutoffs) > 1:
        names = " and ".join(map(str, folders))
        raise ValueError(f"{names} do not hold out the same prompts: give folders that were written together")
    cutoff = next(iter(cutoffs), None) or cutoff_of(prompts)
    sides = divide(prompts, cutoff)
    filled = zip(opened, folders.values(), strict=True)
    parts = [Part(bool(side), shards, wanted, []) for side, (shards, wanted) in enumerate(filled)]
    for part in parts:
        part.shards.meta["held_out_below"] = str(cutoff)
        groups = by_share(sides[part.held_out], shares)
        if not groups and (self_written < 1 if not part.held_out else not self_written):
            side = "--held-out" if part.held_out else "training"
            raise ValueError(f"{path} has no prompt for {side}, which shares none with the other part: give more")
        texts = {prompt.turns[0] for _, group in groups for prompt in group}
        owners = set(range(ranks.count)) if self_written else {rank_of(text, ranks.count) for text in texts}
        own = {text for text in texts if rank_of(text, ranks.count) == ranks.index}
        kept = [(share, [prompt for prompt in group if prompt.turns[0] in own]) for share, group in groups]
        part.prompts = [(share, group) for share, group in kept if group]
        part.distinct, part.writers, part.writes = len(texts), len(owners), ranks.index in owners
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
            f"--tokens {parts[0].wanted} take {size(tokens * token_bytes)}, with those held out, of which "
            f"{size(there * token_bytes)} are there, and {output} has {size(free)} free: at most "
            f"--tokens {max(there + free // token_bytes - others, 0)} fit"
        )
