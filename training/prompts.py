"""Prompts of teacher data: read from JSON lines, divided into those to train on and those held out, drawn by source."""

from __future__ import annotations

import itertools
import json
import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

from redraft.console.progress import heartbeat
from training.teacher_data import USUAL_CUTOFF

RESERVED = 64
RANKS = 2**64
LEAST_RESPONSE = 8
"""Tokens of a response that is worth reading."""
UNNAMED = "unnamed"
"""The source of prompts that name none."""


@dataclass(frozen=True)
class Prompt:
    """A line of the file: what the user says, where it is from, and an answer to read instead of the target's own."""

    prompt: str
    source: str = UNNAMED
    response: str | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file of JSON lines. Raises ValueError naming the file, or the line that is none."""
    prompts = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        prompts.append(_parse(json.loads(line)))
                    except ValueError as error:
                        expected = 'expected {"prompt": text} with, if there are any, "source" and "response"'
                        raise ValueError(f"{path}, line {number}: {error}; {expected}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from None
    except OSError as error:
        raise ValueError(
            f'--prompts {path}: {error.strerror}; give a file of lines {{"prompt": text}}, to make as DATA=FILE'
        ) from None
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def answerable(path: Path, tokenizer, longest: int, reads: bool) -> tuple[list[Prompt], list[str]]:
    """The prompts of a file that have at most `longest` tokens and, where a run `reads` responses, one that is long
    enough; and what to say of those that are left out.

    Raises ValueError where none is left, a response is missing, or the file cannot be read.
    """
    prompts = read_prompts(path)
    if reads and (missing := [prompt.prompt for prompt in prompts if prompt.response is None]):
        raise ValueError(f"--source prefill needs a `response`, the prompt {missing[0]!r} has none")

    def length(text: str | None) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    with heartbeat(lambda: f"distill: counting the tokens of {len(prompts):,} prompts", Console(stderr=True)):
        short = [prompt for prompt in prompts if length(prompt.prompt) <= longest]
        kept = [prompt for prompt in short if not reads or length(prompt.response) >= LEAST_RESPONSE]
    if not short:
        raise ValueError(
            f"all {len(prompts)} prompts of {path} have more than {longest} tokens: shorten them, or give "
            "build/distill.py a larger --max-new-tokens"
        )
    if not kept:
        raise ValueError(f"no response of {path} has {LEAST_RESPONSE} tokens: give longer ones, or --source generate")
    left_out = {
        f"{len(prompts):,} prompts have more than {longest} tokens": len(prompts) - len(short),
        f"{len(short):,} responses have fewer than {LEAST_RESPONSE} tokens": len(short) - len(kept),
    }
    return kept, [f"{count:,} of {which} and are left out" for which, count in left_out.items() if count]


def _parse(row: Any) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.60} is not an object")
    if not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise ValueError(f"`prompt` is {row['prompt']!r:.60}" if "prompt" in row else f"no `prompt` among {[*row]}")
    optional = {name: row[name] for name in ("source", "response") if row.get(name) is not None}
    if wrong := [name for name, value in optional.items() if not isinstance(value, str)]:
        raise ValueError(f"`{wrong[0]}` is {optional[wrong[0]]!r:.60}")
    for text in (row["prompt"], *optional.values()):
        text.encode()
    return Prompt(row["prompt"], **optional)


def rank(prompt: str) -> int:
    """A prompt's place in [0, RANKS), by a hash of its text: the same in every file."""
    value = int.from_bytes(sha256(prompt.strip().encode()).digest()[:8], "big")
    return value % RESERVED * (RANKS // RESERVED) + value // RESERVED


def cutoff_of(prompts: Iterable[Prompt]) -> int:
    """The rank below which prompts are held out: the usual one, which 1 in RESERVED is below, or one with a prompt on
    either side of it where the file has none or only prompts below that. A single prompt is not held out."""
    ranks = sorted({rank(prompt.prompt) for prompt in prompts})
    held_out = bisect_left(ranks, USUAL_CUTOFF)
    if held_out == len(ranks):
        return ranks[-1]
    return ranks[0] + 1 if held_out == 0 and len(ranks) > 1 else USUAL_CUTOFF


def divide(prompts: Iterable[Prompt], cutoff: int) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to train on and the ones held out."""
    sides: tuple[list[Prompt], list[Prompt]] = [], []
    for prompt in prompts:
        sides[rank(prompt.prompt) < cutoff].append(prompt)
    return sides


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
    groups = ((share, [prompt for prompt in prompts if prompt.source == name]) for name, share in shares.items())
    return [(share, group) for share, group in groups if group]


def draw_prompts(groups: Sequence[tuple[float, list[Prompt]]], seed: int) -> Iterator[Prompt]:
    """Endless prompts: a group by its share, then the group's next prompt in an order shuffled by the seed."""
    rng = random.Random(seed)
    shares = [share for share, _ in groups]
    cycles = [itertools.cycle(rng.sample(group, len(group))) for _, group in groups]
    return (next(rng.choices(cycles, shares)[0]) for _ in itertools.count())
