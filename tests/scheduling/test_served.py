"""The scheduler with texts that were served: they change what is drafted, for their scope only, and no text."""

from __future__ import annotations

import numpy as np
import pytest

from redraft import metrics
from redraft.budgets.controller import BudgetController, Estimates
from redraft.budgets.cost import StepCosts, TimeTable
from redraft.decoding.text_store import LONGEST
from redraft.drafting.served import AT_ONCE, ServedTexts, TextOptions
from redraft.scheduling.scheduler import Scheduler
from tests.scheduling.test_scheduler import LIMITS, PLANS, SAMPLINGS, alone, make, run
from tests.toy_engine import ToyEngine, only

JOINED = ["merged", "ngram"]


def scheduler_of(texts, plan="merged"):
    return Scheduler(ToyEngine(slots=3), LIMITS, only(PLANS[plan]), texts=texts)


def texts_of(by_key=True, capacity=2000):
    return ServedTexts(TextOptions(by_key, capacity))


def stored(texts):
    """Tokens that are stored when nothing waits."""
    texts.read(1_000_000)
    return texts.store.counts[0]


def steps(scheduler, **fields):
    """Steps of a greedy answer."""
    return run(scheduler, [make("a", max_tokens=60, **fields)])["a"][4].steps


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("plan", JOINED)
def test_the_text_is_the_same_with_a_full_store(plan, sampling):
    """Of a store that has no room for all of it, and holds the same texts again and again."""
    texts = texts_of(capacity=150)
    prompts = [[1 + key] * 9 for key in range(3)]
    expected = [alone(make(key, SAMPLINGS[sampling], prompt=prompts[key]), slots=3) for key in range(3)]
    for _ in range(3):
        scheduler = scheduler_of(texts, plan)
        sequences = [make(key, SAMPLINGS[sampling], prompt=prompts[key]) for key in range(3)]
        results = run(scheduler, sequences, joins=[0, 0, 4])
        assert [results[key][:4] for key in range(3)] == expected
    assert stored(texts) > 100


@pytest.mark.parametrize("plan", JOINED)
def test_what_was_served_is_drafted(plan):
    scheduler = scheduler_of(texts_of(), plan)
    first, second = steps(scheduler), steps(scheduler)
    assert second < 0.6 * first
    stored(scheduler._texts)
    tokens, guesses, hits = scheduler._texts.store.counts
    assert 60 < tokens < 300
    assert 0 < hits <= guesses
    values = scheduler.metrics
    assert [values.total(entry) for entry in (metrics.TEXT_TOKENS, metrics.TEXT_GUESSES, metrics.TEXT_HITS)] == [
        tokens,
        guesses,
        hits,
    ]


OTHERS = (
    *({"scope": "another"}, {"scope": None}, {"cache_salt": "another"}),
    *({"cache_prompt": False}, {"store": False}, {"draft_trees": True}),
)


@pytest.mark.parametrize("plan", JOINED)
@pytest.mark.parametrize("other", OTHERS)
def test_what_was_served_to_another_is_not_drafted(other, plan):
    texts = texts_of()
    scheduler = scheduler_of(texts, plan)
    first = steps(scheduler, **{"scope": "one", **other})
    assert (stored(texts) == 0) == (False in other.values() or "draft_trees" in other)
    assert steps(scheduler, scope="one") == first
    assert steps(scheduler, scope="one") < first


def test_what_waits_does_not_grow_without_end():
    """Where each step ends a request of more tokens than it stores."""
    texts, sequence = texts_of(capacity=100_000), make("a", prompt=[1, 2, 3] * 60)
    scheduler = scheduler_of(texts)
    scheduler.submit(sequence)
    for _ in range(40):
        scheduler.step()
    sequence.prompt = np.resize(np.arange(100, dtype=np.int32), 3 * AT_ONCE)
    for _ in range(200):
        texts.take(sequence)
        texts.read()
    assert len(texts._waiting) < 20


@pytest.mark.parametrize("plan", JOINED)
@pytest.mark.parametrize("apart", [{"cache_prompt": False}, {"draft_trees": True}])
def test_who_shares_nothing_or_shows_drafts_is_drafted_from_its_own_text(apart, plan):
    scheduler = scheduler_of(texts_of(), plan)
    first = steps(scheduler)
    assert steps(scheduler, **apart) == first > steps(scheduler)


def test_all_keys_may_share():
    """But not those of a salt, which are of one key."""
    for fields in ({}, {"cache_salt": "salt"}):
        scheduler = scheduler_of(texts_of(by_key=False))
        first = steps(scheduler, scope="one", **fields)
        assert (steps(scheduler, scope="another", **fields) < first) == (not fields)


def test_a_cached_prompt_is_stored_once():
    """With the tokens before its end that a match may have."""
    texts, prompt = texts_of(), [3, 4, 5, 6] * 20
    scheduler = scheduler_of(texts)
    results = run(scheduler, [make("a", prompt=prompt, max_tokens=9)])
    before = stored(texts)
    results = run(scheduler, [make("a", prompt=prompt, max_tokens=9)])
    cached = results["a"][4].cached_tokens
    assert cached > LONGEST
    assert stored(texts) - before == before - cached + LONGEST


def test_cancelled_requests_are_stored_and_long_texts_over_several_steps():
    texts = texts_of()
    sequence = make("a", prompt=list(range(90)), max_tokens=60)
    scheduler = scheduler_of(texts)
    scheduler.submit(sequence)
    for _ in range(9):
        scheduler.step()
    scheduler.cancel("a")
    scheduler.step()
    assert stored(texts) == 90 + sequence.stats.output_tokens
    other = texts_of()
    sequence.finish_reason = "length"
    other.take(sequence)
    for step in range(1, 20):
        other.read(7)
        assert other.store.counts[0] == min(7 * step, 90 + sequence.stats.output_tokens)
    text = tuple(sequence.text_tokens.tolist())
    assert all(other.store.match(sequence.scope, text[:end]).token == text[end] for end in range(LONGEST, len(text)))


class Steady(BudgetController):
    """Is told of steps of which the drafter's call takes a third, and may always draft."""

    def end(self, methods, bands, tree, accepted, step_s, target_s):
        guesses = any(drafts.guesses for drafts in self.step.drafts.values())
        super().end(methods, bands, tree, accepted, 1e-3 if guesses or not self.step.drafts else 1.5e-3, 1e-3)
        self.balance_s = 1.0


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_the_drafter_is_not_called_where_guesses_suffice(sampling):
    """And the text is the same."""
    engine = ToyEngine(slots=3)
    table = TimeTable(sequences=3, rows=[1, 100], seconds=[1e-3, 1e-3], padded=False)
    budgets = Steady(Estimates(costs=StepCosts(tables=[table])))
    scheduler = Scheduler(engine, LIMITS, only(PLANS["merged"]), budgets=budgets, texts=texts_of())
    expected = alone(make("a", SAMPLINGS[sampling], max_tokens=60))
    called = []
    for _ in range(9):
        before = engine.draft_calls
        result = run(scheduler, [make("a", SAMPLINGS[sampling], max_tokens=60)])["a"]
        assert result[:4] == expected
        called.append((engine.draft_calls - before) / result[4].steps)
    assert min(called[-3:]) < 0.5 < max(called[:3]) or sampling == "sampled"
