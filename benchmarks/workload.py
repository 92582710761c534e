"""What a load test sends: prompts from a file, the chat template, and the times at which requests arrive."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from redraft.chat import render_chat

ARRIVALS = ("constant", "poisson")


@dataclass(frozen=True)
class Prompt:
    """One conversation's user turns, at least one."""

    question_id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a JSON-lines file: `turns` with `question_id` and `category` (MT-bench, Spec-Bench), or `prompt`.

    Raises ValueError naming the file, the line and what is wrong with it.
    """
    prompts = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    prompts.append(_parse(json.loads(line), number))
                except (json.JSONDecodeError, ValueError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return prompts


def _parse(row: Any, number: int) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {row!r:.60}")
    turns = row.get("turns", [row["prompt"]] if "prompt" in row else None)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"expected 'turns' (a list of texts) or 'prompt' (a text), got {turns!r:.60}")
    return Prompt(str(row.get("question_id", number)), str(row.get("category", "all")), tuple(turns))


class ChatTokenizer:
    """Tokenizer and chat template of a model folder or an engine bundle."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{self.folder}: no tokenizer.json; expected a model folder or an engine bundle")
        self._tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def chat(self, user: str) -> str:
        """One user turn as the text that the model continues with its answer."""
        return render_chat(self.folder, user)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that already holds its special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._tokenizer.decode(token_ids)


def arrival_times(
    rate: float, count: int, process: str = "poisson", burstiness: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Start times in seconds, float64 [count], ascending from 0, at `rate` requests per second on average.

    `constant` spaces them evenly. `poisson` draws the gaps from a gamma distribution with shape `burstiness`: 1 is a
    Poisson process, below 1 more bursty, above 1 more even; drawn gaps are scaled so that the last request starts at
    (count - 1) / rate, which makes runs of few requests comparable. An infinite rate starts all at 0.
    Raises ValueError for a rate, count, burstiness or process out of range.
    """
    if not rate > 0:
        raise ValueError(f"request rate: expected a number above 0 or inf, got {rate}")
    if count < 1:
        raise ValueError(f"number of prompts: expected at least 1, got {count}")
    if process not in ARRIVALS:
        raise ValueError(f"arrival: expected one of {', '.join(ARRIVALS)}, got {process!r}")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ValueError(f"burstiness: expected a finite number above 0, got {burstiness}")
    if math.isinf(rate) or count == 1:
        return np.zeros(count)
    if process == "constant":
        return np.arange(count) / rate
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0, count - 1)
    return np.concatenate([[0.0], np.cumsum(gaps)]) * ((count - 1) / rate / gaps.sum())


def spread(prompts: list[Prompt], count: int | None) -> list[Prompt]:
    """`count` prompts evenly spaced over a file that is sorted by kind; all of them for None or more than there are."""
    if count is None or count >= len(prompts):
        return prompts
    return [prompts[index * len(prompts) // count] for index in range(count)]


def pick_prompts(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` prompts in a seeded random order; each is used once before any is used again."""
    generator = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < count:
        order += generator.permutation(len(prompts)).tolist()
    return [prompts[index] for index in order[:count]]
