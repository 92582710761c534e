"""What a load test sends: conversations written with the chat template, and the times at which they begin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from redraft.chat import ChatMessage, ChatTemplate
from redraft.prompts import Prompt
from redraft.request import GenerateRequest, request

ARRIVALS = ("constant", "poisson")


class ChatTokenizer:
    """Tokenizer and chat template of a model folder or an engine bundle."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{self.folder}: no tokenizer.json; expected a model folder or an engine bundle")
        self._tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def chat(self, user: str) -> str:
        """One user turn as the text that the model continues with its answer: as it is without a chat template."""
        return self.write([{"role": "user", "content": user}])

    def request(self, user: str, max_tokens: int, **options: Any) -> GenerateRequest:
        """A request for the answer to one user turn; `options` as of `redraft.request.request`."""
        return self.request_of([{"role": "user", "content": user}], max_tokens, **options)

    def request_of(self, messages: Sequence[ChatMessage], max_tokens: int, **options: Any) -> GenerateRequest:
        """A request for the next answer of a conversation."""
        return request(self.write(messages), max_tokens, add_special_tokens=self.adds_special_tokens, **options)

    @cached_property
    def adds_special_tokens(self) -> bool:
        """Whether a server may add the tokenizer's special tokens to what this writes. A template writes them itself.
        Only a tokenizer that has any makes this false, since other servers may not know the field."""
        return self.template is None or not self._tokenizer.num_special_tokens_to_add(False)

    def write(self, messages: Sequence[ChatMessage]) -> str:
        """A conversation as the text that the model continues. Without a chat template a single message is that text;
        more are a ValueError."""
        if self.template is not None:
            return self.template.render(messages)
        if len(messages) > 1:
            raise ValueError(f"{self.folder} has no chat template, so it cannot write {len(messages)} messages")
        return messages[0]["content"]

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The folder's chat template, if it has one."""
        try:
            return ChatTemplate.load(self.folder)
        except FileNotFoundError:
            return None

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


def pick_prompts(prompts: list[Prompt], count: int, seed: int, skip: int = 0) -> list[Prompt]:
    """`count` prompts in a seeded random order, after the first `skip` of that order; each is used once before any is
    used again."""
    generator = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < skip + count:
        order += generator.permutation(len(prompts)).tolist()
    return [prompts[index] for index in order[skip : skip + count]]


@dataclass(frozen=True)
class Conversation:
    """What one client sends: user turns, each after the answer to the one before."""

    question_id: str
    category: str
    turns: tuple[str, ...]
    seed: int
    """The sampling seed of all of its requests"""
    system: str | None = None

    @property
    def opening(self) -> tuple[ChatMessage, ...]:
        """The messages before the first user turn."""
        return ({"role": "system", "content": self.system},) if self.system is not None else ()


class Passages:
    """Text of given lengths, made of the prompts of a file; `seed` draws the places of passages."""

    def __init__(self, prompts: Sequence[Prompt], tokenizer: ChatTokenizer, seed: int):
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode("\n".join(turn for prompt in prompts for turn in prompt.turns))
        self._places = np.random.default_rng(seed)

    def take(self, tokens: int, begin: int = 0) -> str:
        """About so many tokens of text, from token `begin` on, starting over at the end."""
        indices = (begin + np.arange(tokens)) % len(self._ids)
        return self._tokenizer.decode([self._ids[index] for index in indices])

    def lengthened(self, turn: str, system: str | None, tokens: int) -> str:
        """A user turn with a passage before it, so that the whole prompt has `tokens` tokens or up to 1% fewer.

        Passages begin at places of their own, so that prompts share none. Raises ValueError for a turn that is longer
        by itself.
        """
        begin, wanted, text = int(self._places.integers(len(self._ids))), 0, turn
        opening = Conversation("", "", (), 0, system).opening
        for _ in range(8):
            length = len(self._tokenizer.encode(self._tokenizer.write([*opening, {"role": "user", "content": text}])))
            if tokens - tokens // 100 <= length <= tokens:
                return text
            wanted += tokens - tokens // 200 - length
            if wanted < 0:
                break
            text = f"{self.take(wanted, begin)}\n\n{turn}"
        raise ValueError(f"expected prompts of at most {tokens} tokens to lengthen, got one of {length} tokens")


def conversations_of(
    prompts: list[Prompt],
    count: int,
    seed: int,
    tokenizer: ChatTokenizer,
    multi_turn: bool = False,
    shared_prefix: int = 0,
    prompt_tokens: int = 0,
    skip: int = 0,
) -> list[Conversation]:
    """At least one conversation, and as many as have `count` turns together; `seed` orders the prompts and draws
    the places of their passages. The first `skip` of the order are left out: other tests had them.

    Only first turns are sent unless `multi_turn`. All begin with one system message of about `shared_prefix` tokens, if
    that is not 0. First prompts are lengthened to `prompt_tokens`, if that is not 0: longer ones are left out. Raises
    ValueError where none is left.
    """
    passages = Passages(prompts, tokenizer, seed + skip) if shared_prefix or prompt_tokens else None
    system = passages.take(shared_prefix) if passages and shared_prefix else None
    if prompt_tokens:
        prefix = shared_prefix + len(tokenizer.encode(tokenizer.chat("")))
        prompts = [
            p for p in prompts if len(tokenizer.encode(p.turns[0])) + prefix < prompt_tokens - prompt_tokens // 100
        ]
        if not prompts:
            raise ValueError(f"prompt tokens: expected more than the shortest prompt has, got {prompt_tokens}")
    made: list[Conversation] = []
    left = count
    for index, prompt in enumerate(pick_prompts(prompts, count, seed, skip), skip):
        if left <= 0:
            break
        first, *others = prompt.turns[: left if multi_turn else 1]
        left -= 1 + len(others)
        if passages and prompt_tokens:
            first = passages.lengthened(first, system, prompt_tokens)
        made.append(Conversation(prompt.question_id, prompt.category, (first, *others), seed + index, system))
    return made
