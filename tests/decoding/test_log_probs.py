"""Log-probabilities: known answers, and what requests get through the real scheduler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.decoding.log_probs import LogProbs
from redraft.scheduling.scheduler import Scheduler
from tests.scheduling.test_scheduler import LIMITS, PLANS, ChoosingEngine, make
from tests.toy_drafter import DrawingToyEngine
from tests.toy_engine import ToyEngine, only

BUDGET = BudgetTable.constant(9)
RANDOM = {
    "rejection": ("random_chain", (1, 1, 1)),
    "recursive_rejection": ("gumbel_top_k", (3, 2)),
    "multi_round": ("independent", (3, 3)),
    "k_seq": ("independent", (3, 3)),
}
PROCESSED = {"repetition_penalty": 1.4, "min_length": 9, "logit_bias": {5: 6.0, 17: 4.0}}
SAMPLINGS = {"greedy": PROCESSED, "sampled": PROCESSED | {"temperature": 0.7, "top_k": 9, "seed": 5}}
PROMPT = [*range(1, 40)]
"""More than two prefill chunks."""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    return exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())


def of_row(logits: np.ndarray, token: int, alternatives: int = 0) -> LogProbs:
    """After a row of equal logits, more of which are among the likeliest than are asked for."""
    found = LogProbs.of(np.stack([np.ones_like(logits), logits]), [0, token], alternatives)
    return LogProbs(found.chosen[1:], found.best[1:], found.values[1:])


@pytest.mark.parametrize("offset", [0, 1e4, -1e4])
def test_a_tokens_log_probability(offset):
    """An offset, which changes no probability, would overflow a plain sum of exponentials."""
    logits = (np.random.default_rng(0).normal(size=111) * 9 + offset).astype(np.float32)
    found = of_row(logits, 7)
    assert found.chosen == pytest.approx([log_softmax(logits)[7]], rel=1e-5)
    assert found.top == [[]]


@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize("vocab_size", [2, 111, 5003])
def test_alternatives_are_the_likeliest_in_order(count, vocab_size):
    logits = np.random.default_rng(count).normal(size=vocab_size).astype(np.float32)
    expected = np.argsort(-logits)[:count]
    (found,) = of_row(logits, 0, count).top
    assert [token for token, _ in found] == expected.tolist()
    assert [value for _, value in found] == pytest.approx(log_softmax(logits)[expected].tolist(), rel=1e-5)


def test_of_equals_the_lowest_ids_come_first():
    """As in greedy decoding, whose token is then the first alternative."""
    logits = np.array([0, 2, 3, 2, 3, 2, 2], np.float32)
    assert [token for token, _ in of_row(logits, 0, 4).top[0]] == [2, 4, 1, 3]
    assert [token for token, _ in of_row(np.zeros(900, np.float32), 0, 3).top[0]] == [0, 1, 2]


def answers(scheduler: Scheduler, sequences: list) -> dict:
    """Tokens, log-probabilities, alternatives and both of the prompt by key."""
    found: dict = {}
    for sequence in sequences:
        scheduler.submit(sequence)
    while not scheduler.idle:
        for output in scheduler.step():
            tokens, logs, top, prompt_logs, prompt_top, _ = found.get(output.key, ([], [], [], None, None, None))
            assert prompt_logs is None or output.prompt_log_probs is None, "once"
            found[output.key] = (
                tokens + output.token_ids, logs + (output.log_probs or []), top + (output.top_log_probs or []),
                output.prompt_log_probs or prompt_logs, output.prompt_top_log_probs or prompt_top, output.finish_reason,
            )  # fmt: skip
    return found


def check(engine: ToyEngine, prompt: list[int], answer: tuple, alternatives: int) -> None:
    """Compare an answer with the target's distribution after every token of its text, the prompt's first one too."""
    tokens, logs, top, prompt_logs, prompt_top, _ = answer
    assert prompt_logs[0] is None
    text = [*prompt, *tokens]
    for place, value in enumerate([*prompt_logs, *logs]):
        if place:
            expected = log_softmax(engine.logits_after(engine.path_state(text[:place])))
            assert value == pytest.approx(expected[text[place]], abs=1e-5)
            if alternatives:
                likeliest = np.argsort(-expected, kind="stable")[:alternatives].tolist()
                found = [*prompt_top, *top][place]
                assert [token for token, _ in found] == likeliest
                assert [value for _, value in found] == pytest.approx(expected[likeliest].tolist(), abs=1e-5)
    assert len(prompt_logs) == len(prompt)
    assert len(logs) == len(tokens)
    if alternatives:
        assert prompt_top[0] == []
        assert (len(top), len(prompt_top)) == (len(tokens), len(prompt))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", ["auto_regressive", "beam", "merged", *RANDOM])
def test_each_method_gives_the_targets_own(method, sampling):
    """In a batch with others: of every node on the accepted path, of the first token and of the prompt's, whatever
    processors and filters a request has."""
    if method in RANDOM:
        construction, levels = RANDOM[method]
        engine: ToyEngine = DrawingToyEngine(construction, levels, 20, slots=3, sharpness=1.0)
        plan = MethodConfig(construction=construction, verification=method, budget=BUDGET, levels=levels, support=20)
    else:
        engine, plan = ToyEngine(slots=3), PLANS.get(method)
    options = {"sampling": SAMPLINGS[sampling], "max_tokens": 30, "prompt_log_probs": True, "end_ids": frozenset({0})}
    sequences = [
        make("both", prompt=PROMPT, top_log_probs=5, stream=True, **options),
        make("no alternatives", prompt=PROMPT[9:20], **options),
        make("neither", prompt=PROMPT[5:], return_log_probs=False, max_tokens=30),
        make("late", prompt=PROMPT[:1], top_log_probs=1, **options),
    ]
    found = answers(Scheduler(engine, LIMITS, only(plan)), sequences)
    for key, prompt, alternatives in (("both", PROMPT, 5), ("no alternatives", PROMPT[9:20], 0), ("late", [1], 1)):
        check(engine, prompt, found[key], alternatives)
    assert found["neither"][1:5] == ([], [], None, None)
    if method != "auto_regressive":
        assert sum(sequence.stats.accepted for sequence in sequences) > 0


@pytest.mark.parametrize("kind", [ToyEngine, ChoosingEngine])
def test_log_probabilities_change_no_token(kind):
    """Also where an engine chooses the tokens of requests that ask for none: it gives logits of the prompt's rows, and
    then tokens again."""
    options = {"prompt": PROMPT, "max_tokens": 30, "sampling": {"temperature": 0.8, "seed": 3}}
    found = []
    for extra in ({}, {"prompt_log_probs": True}, {"prompt_log_probs": True, "top_log_probs": 3}):
        sequences = [make(key, return_log_probs=False, **options, **extra) for key in range(3)]
        found.append(answers(Scheduler(kind(slots=3), LIMITS, only(PLANS["merged"])), sequences))
    assert all(answer[0] == found[0][0][0] for each in found for answer in each.values())
    assert found[1][0][1] == []
    assert found[1][0][3] == found[2][0][3]


@pytest.mark.parametrize("length", [1, 16, 17, 39])
def test_a_prompt_is_scored_without_an_answer(length):
    """`max_tokens` 0, beside requests that go on. The slot is free again, and others' totals are not disturbed."""
    engine = ToyEngine(slots=3)
    scheduler = Scheduler(engine, replace(LIMITS, max_queue=9), only(PLANS["beam"]))
    scored = [make(key, prompt=PROMPT[:length], max_tokens=0, prompt_log_probs=True) for key in range(6)]
    found = answers(scheduler, [make("other", prompt=[1, 2]), *scored])
    for sequence in scored:
        check(engine, PROMPT[:length], found[sequence.key], 0)
        assert found[sequence.key][0] == []
        assert found[sequence.key][-1] == "length"
        assert sequence.stats.output_tokens == sequence.stats.steps == 0
        assert sequence.stats.prefill_ms > 0
    assert (
        found["other"][0] == answers(Scheduler(ToyEngine(slots=3), LIMITS), [make("other", prompt=[1, 2])])["other"][0]
    )
    assert scheduler.totals.output_tokens == len(found["other"][0])


def test_only_those_who_ask_pay_for_the_prompts_logits():
    """One row of logits for each prompt that ends, all rows of those that are scored, never more than a chunk."""
    rows: list[int] = []

    class Counting(ToyEngine):
        def execute(self, batch, samplers=None, meanwhile=None):
            rows.append(len(batch.logit_rows))
            return super().execute(batch, samplers)

    scheduler = Scheduler(Counting(slots=3), LIMITS)
    answers(scheduler, [make("plain", prompt=PROMPT, max_tokens=1)])
    assert rows == [0, 0, 1]
    rows.clear()
    answers(scheduler, [make("scored", prompt=PROMPT, max_tokens=1, prompt_log_probs=True)])
    assert rows == [16, 16, 7]


def test_a_request_that_is_cancelled_in_its_prompt_has_no_scores():
    scheduler = Scheduler(ToyEngine(slots=3), LIMITS)
    scheduler.submit(make("gone", prompt=PROMPT, prompt_log_probs=True, top_log_probs=2))
    scheduler.step()
    scheduler.cancel("gone")
    (output,) = scheduler.step()
    assert (output.finish_reason, output.prompt_log_probs, output.prompt_top_log_probs) == ("cancelled", None, None)
