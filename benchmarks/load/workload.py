"""What a load test sends: the chat template around prompts, and the times at which requests arrive."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from redraft.chat import user_prompt
from redraft.prompts import Prompt

ARRIVALS = ("constant", "poisson")
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def kinds_of(prompts: list[Prompt]) -> list[str]:
    """Each prompt's kind: its category, but MT-bench's eight are one where a file has others too (Spec-Bench)."""
    alone = all(prompt.category in MT_BENCH for prompt in prompts)
    return [prompt.category if alone or prompt.category not in MT_BENCH else "mt_bench" for prompt in prompts]


class ChatTokenizer:
    """Tokenizer and chat template of a model folder or an engine bundle."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{self.folder}: no tokenizer.json; expected a model folder or an engine bundle")
        self._tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def chat(self, user: str) -> str:
        """One user turn as the text that the model continues with its answer: as it is without a chat template."""
        return user_prompt(self.folder, user)

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


def pick_prompts(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` prompts in a seeded random order; each is used once before any is used again."""
    generator = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < count:
        order += generator.permutation(len(prompts)).tolist()
    return [prompts[index] for index in order[:count]]
