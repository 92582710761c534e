"""Random conversations through the real scheduler, whose answers must be those without reuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from redraft.bundle.method import MethodConfig
from redraft.engines.api import Engine
from redraft.output import Output
from redraft.request import AUTO_REGRESSIVE, GenerateRequest
from redraft.request_state import RequestState
from redraft.scheduling import slots
from redraft.scheduling.scheduler import Limits, Scheduler
from tests.toy_engine import toy_codec

VOCAB = 111
CODEC = toy_codec()
FEW_ROWS = 4
"""`slots.COPY_ROWS` and `slots.SKIPPED_PAIRS` for small prompts."""
ANSWER = 18
"""Most tokens of an answer."""


class Conversations:
    """Requests that go on from what others have sent and answered, that share an opening, or that are new."""

    def __init__(self, seed: int, methods: list[str], longest: int):
        self._random, self._methods = np.random.default_rng(seed), methods
        self._longest = longest - ANSWER - 8
        self._opening = self._tokens(19)
        self.texts: list[list[int]] = []
        """What was sent and answered."""

    def _tokens(self, count: int) -> list[int]:
        return self._random.integers(1, VOCAB, count).tolist()

    def _prompt(self) -> list[int]:
        new, kind = self._tokens(int(self._random.integers(1, 9))), self._random.random()
        if not self.texts or kind < 0.1:
            return [*new, *self._tokens(20)]
        if kind < 0.3:
            return self._opening + new
        text = self.texts[int(self._random.integers(max(len(self.texts) - 2, 0), len(self.texts)))]
        cut = int(self._random.integers(1, len(text) + 1)) if kind < 0.5 else len(text)
        return text[: min(cut, self._longest)] + (new if kind > 0.4 else [])

    def next(self) -> dict[str, Any]:
        """Fields of the next request."""
        draw = self._random.random
        options: dict[str, Any] = {"input_ids": self._prompt(), "method": str(self._random.choice(self._methods))}
        options |= {"max_tokens": int(self._random.integers(1, ANSWER)), "stop_words": ["a", "T", "m"]}
        options |= {"sampling": {"temperature": 1.0, "seed": 5}} if draw() < 0.4 else {}
        options |= {"return_log_probs": draw() >= 0.4}
        options |= {"prompt_log_probs": True} if draw() < 0.1 else {}
        options |= {"cache_prompt": False} if draw() < 0.1 else {}
        options |= {"cache_salt": "other"} if draw() < 0.1 else {}
        return options


def state_of(key: int, options: dict[str, Any]) -> RequestState:
    request = GenerateRequest(id=str(key), **options)
    return RequestState(key, request, options["input_ids"], CODEC, frozenset({0}))


def converse(
    engine: Engine, limits: Limits, plans: Mapping[str, MethodConfig], seed: int, count: int, tolerance: float = 0.0
) -> tuple[float, int]:
    """Serve `count` requests of conversations, some of which are cancelled. Asserts that each answer is what it is
    without reuse: the same tokens, with the same log-probabilities, to the last bit unless a `tolerance` is given.

    Returns the share of prompt tokens that were reused, and how many copies there were.
    """
    conversations = Conversations(seed, [*plans, AUTO_REGRESSIVE], limits.max_len)
    scheduler, random = Scheduler(engine, limits, plans), np.random.default_rng(seed)
    asked: list[dict[str, Any]] = []
    answers: dict[int, Output] = {}
    few = patch.multiple(slots, COPY_ROWS=FEW_ROWS, SKIPPED_PAIRS=FEW_ROWS)
    with few, patch.object(engine, "copy", wraps=engine.copy) as copy:
        while len(asked) < count or not scheduler.idle:
            if len(asked) < count and random.random() < 0.3:
                asked.append(conversations.next())
                scheduler.submit(state_of(len(asked) - 1, asked[-1]))
            if asked and random.random() < 0.05:
                scheduler.cancel(len(asked) - 1)
            for output in scheduler.step():
                answers[output.key] = output  # type: ignore[index]
                conversations.texts.append(asked[output.key]["input_ids"] + output.token_ids)  # type: ignore[index,operator]
    anew = Scheduler(engine, limits, plans, prefix_reuse=False)
    for key, options in enumerate(asked):
        anew.submit(state_of(key, options))
        while not (outputs := anew.step()):
            pass
        assert_same(answers[key], outputs[0], tolerance)
    return scheduler.totals.prefix_cache_hits / scheduler.totals.prefix_cache_queries, copy.call_count


def assert_same(found: Output, expected: Output, tolerance: float) -> None:
    """The same answer; of a cancelled one, so much of it."""
    length = len(found.token_ids) if found.finish_reason == "cancelled" else None
    assert found.token_ids == expected.token_ids[:length], found.key
    assert (found.log_probs or []) == pytest.approx((expected.log_probs or [])[:length], rel=0, abs=tolerance)
    if length is None:
        assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason), found.key
        known = [one.prompt_log_probs[1:] if one.prompt_log_probs else [] for one in (found, expected)]
        assert known[0] == pytest.approx(known[1], rel=0, abs=tolerance)
