"""Prompts of teacher data: divided into those to train on and those held out, and drawn by source."""

from __future__ import annotations

import itertools
import json
import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from rich.console import Console

from redraft.console.progress import heartbeat
from redraft.prompts import Prompt
from redraft.training.ranks import this_rank
from redraft.training.teacher_data import USUAL_CUTOFF

RESERVED = 64
HASHES = 2**64
LEAST_RESPONSE = 8
"""Tokens of a response that is worth reading."""


def answerable(
    path: Path, prompts: Sequence[Prompt], tokenizer, longest: int, reads: bool
) -> tuple[list[Prompt], list[str]]:
    """The prompts of the file `path` that have at most `longest` tokens and, where a run `reads` responses, one that is
    long enough; and what to say of those that are left out.

    Raises ValueError where none is left, or a response is missing.
    """
    if reads and (missing := [prompt.turns[0] for prompt in prompts if prompt.response is None]):
        raise ValueError(f"--source prefill needs a `response`, the prompt {missing[0]!r:.60} has none")

    def length(text: str | None) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    console = Console(stderr=True, quiet=not this_rank().first)
    with heartbeat(lambda: f"distill: counting the tokens of {len(prompts):,} prompts", console):
        short = [prompt for prompt in prompts if length(prompt.turns[0]) <= longest]
        kept = [prompt for prompt in short if not reads or length(prompt.response) >= LEAST_RESPONSE]
    if not short:
        raise ValueError(f"all {len(prompts)} prompts of {path} have more than {longest} tokens: shorten them")
    if not kept:
        raise ValueError(f"no response of {path} has {LEAST_RESPONSE} tokens: give longer ones, or --source generate")
    left_out = {
        f"{len(prompts):,} prompts have more than {longest} tokens": len(prompts) - len(short),
        f"{len(short):,} responses have fewer than {LEAST_RESPONSE} tokens": len(short) - len(kept),
    }
    return kept, [f"{count:,} of {which} and are left out" for which, count in left_out.items() if count]


def prompt_hash(prompt: str) -> int:
    """A prompt's place in [0, HASHES), by a hash of its text: the same in every file."""
    value = int.from_bytes(sha256(prompt.strip().encode()).digest()[:8], "big")
    return value % RESERVED * (HASHES // RESERVED) + value // RESERVED


def rank_of(prompt: str, count: int) -> int:
    """Which of `count` ranks answers a prompt: by another part of its hash than the one that holds it out."""
    return prompt_hash(prompt) % (HASHES // RESERVED) % count


def cutoff_of(prompts: Iterable[Prompt]) -> int:
    """The hash below which prompts are held out: the usual one, which 1 in RESERVED is below, or one with a prompt on
    either side of it where the file has none or only prompts below that. A single prompt is not held out. Without
    prompts it is the usual one."""
    hashes = sorted({prompt_hash(prompt.turns[0]) for prompt in prompts})
    held_out = bisect_left(hashes, USUAL_CUTOFF)
    if hashes and held_out == len(hashes):
        return hashes[-1]
    return hashes[0] + 1 if held_out == 0 and len(hashes) > 1 else USUAL_CUTOFF


def divide(prompts: Iterable[Prompt], cutoff: int) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to train on and the ones held out."""
    sides: tuple[list[Prompt], list[Prompt]] = [], []
    for prompt in prompts:
        sides[prompt_hash(prompt.turns[0]) < cutoff].append(prompt)
    return sides


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """16 hexadecimal digits of what teacher data take from prompts: source, first user turn and response."""
    rows = [[prompt.category, prompt.turns[0], prompt.response] for prompt in prompts]
    return sha256(json.dumps(rows).encode()).hexdigest()[:16]


def parse_shares(text: str) -> dict[str, float]:
    """Shares by source from source=share,source=share. Raises ValueError for anything else."""
    try:
        shares = {name: float(share) for name, share in (part.rsplit("=", 1) for part in text.split(","))}
    except ValueError:
        raise ValueError(f"--shares {text!r} is not of the form source=share,source=share") from None
    if not all(0 < share < math.inf for share in shares.values()):
        raise ValueError(f"--shares {text!r}: expected shares above 0")
    return shares


def by_share(prompts: Sequence[Prompt], shares: Mapping[str, float]) -> list[tuple[float, list[Prompt]]]:
    """Groups of prompts with how often each is drawn: the sources that `shares` names, or without any the whole file,
    so that every prompt is drawn as often as another."""
    if not shares:
        return [(1.0, list(prompts))] if prompts else []
    groups = ((share, [prompt for prompt in prompts if prompt.category == name]) for name, share in shares.items())
    return [(share, group) for share, group in groups if group]


def draw_prompts(groups: Sequence[tuple[float, list[Prompt]]], seed: int) -> Iterator[Prompt]:
    """Endless prompts: a group by its share, then the group's next prompt in an order shuffled by the seed."""
    rng = random.Random(seed)
    shares = [share for share, _ in groups]
    cycles = [itertools.cycle(rng.sample(group, len(group))) for _, group in groups]
    return (next(rng.choices(cycles, shares)[0]) for _ in itertools.count())
