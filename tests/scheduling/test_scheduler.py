"""The scheduler on the toy engine: speculation and batching change nothing but the number of steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from redraft.batch import DraftBatch
from redraft.bundle.budget_table import BudgetEntry, BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.engines.cuda.sampling import sample
from redraft.engines.cuda.transfer import Results
from redraft.request import GenerateRequest
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Overloaded, Scheduler
from tests.toy_engine import ToyEngine, _mix, only, toy_codec

CODEC = toy_codec()
LIMITS = Limits(slots=3, max_len=256, max_tree=24, prefill_chunk=16, max_queue=4)
PLANS = {
    "beam": MethodConfig(construction="beam", tree_budget=23),
    "beam cut": MethodConfig(construction="beam", tree_budget=5),
    "best_first": MethodConfig(construction="best_first", tree_budget=9),
    "chain": MethodConfig(construction="chain", tree_budget=9),
    "ngram": MethodConfig(construction=None, ngram=True, tree_budget=9),
    "likely nodes": MethodConfig(
        construction="best_first",
        ngram=True,
        budget=BudgetTable(entries=[BudgetEntry(running=1, nodes=9, chance=0.05)]),
    ),
    "merged": MethodConfig(construction="best_first", ngram=True, tree_budget=12),
    "beam merged": MethodConfig(construction="beam", ngram=True, tree_budget=7),
    "greedy verifier": MethodConfig(construction="best_first", verification="greedy", tree_budget=9),
}
SAMPLINGS = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "sampled": {"temperature": 1.0, "seed": 7},
    "top-p": {"temperature": 0.8, "top_p": 0.9, "seed": 8},
    "top-k": {"temperature": 1.5, "top_k": 7, "top_p": 0.95, "seed": 9, "repetition_penalty": 1.2},
    "min-p": {"temperature": 1.5, "min_p": 0.08, "top_p": 0.97, "seed": 10},
    "min length": {"temperature": 1.0, "seed": 3, "min_length": 30},
    "biases": {"temperature": 1.0, "seed": 4, "logit_bias": {0: -100.0, 1: 3.5}},
    "greedy biases": {"logit_bias": {0: -100.0, 1: 2.5}, "repetition_penalty": 1.1},
}


def make(key, sampling=None, prompt=None, max_tokens=40, end_ids=frozenset({0}), return_log_probs=True, **fields):
    prompt = prompt if prompt is not None else list(range(1, 30))
    request = GenerateRequest(
        id=str(key), input_ids=prompt, max_tokens=max_tokens, sampling=sampling or {},
        return_log_probs=return_log_probs, **fields,
    )  # fmt: skip
    return RequestState(key, request, prompt, CODEC, end_ids)


def run(scheduler, sequences, joins=None):
    """Outputs per key (text, tokens, log-probs, reason), sequences submitted at the steps that `joins` names."""
    joins = joins or [0] * len(sequences)
    waiting = sorted(zip(joins, range(len(sequences)), sequences, strict=True), key=lambda item: item[:2])
    results: dict = {}
    step = 0
    while waiting or not scheduler.idle:
        while waiting and waiting[0][0] <= step:
            scheduler.submit(waiting.pop(0)[2])
        for output in scheduler.step():
            text, tokens, log_probs, _, _ = results.get(output.key, ("", [], [], None, None))
            results[output.key] = (
                text + output.text, tokens + output.token_ids, log_probs + (output.log_probs or []),
                output.finish_reason, output.stats,
            )  # fmt: skip
        step += 1
        assert step < 3000
    return results


def alone(sequence, **engine):
    return run(Scheduler(ToyEngine(**engine), LIMITS), [sequence])[sequence.key][:4]


@pytest.mark.parametrize("plan", [None, "merged"])
def test_a_stop_token_ends_the_text_and_is_no_part_of_it(plan):
    def answer(**fields):
        scheduler = Scheduler(ToyEngine(), LIMITS, only(plan and PLANS[plan]))
        return run(scheduler, [make("a", end_ids=frozenset(), **fields)])["a"]

    _, tokens, _, _, _ = answer()
    stop = next(token for token in tokens[5:] if token not in tokens[:5])
    ended = answer(stop_token_ids=[stop], end_id=-1)
    assert (ended[1], ended[3]) == (tokens[: tokens.index(stop)], "stop")
    held = answer(stop_token_ids=[stop], sampling={"min_length": 30})
    assert stop not in held[1][:30]


def worded(sampling):
    words = {"bad_words": ["ab", "c"], "stop_words": ["zz", "q!"]}
    return make("a", sampling=SAMPLINGS[sampling], max_tokens=60, **words)


@cache
def worded_alone(sampling):
    return alone(worded(sampling), slots=3)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("plan", PLANS)
def test_speculation_equals_autoregressive(plan, sampling):
    got = run(Scheduler(ToyEngine(slots=3), LIMITS, only(PLANS[plan])), [worded(sampling)])["a"]
    assert got[:4] == worded_alone(sampling)
    stats = got[4]
    assert stats.output_tokens <= 1 + stats.steps + stats.accepted
    if sampling == "greedy" and plan != "ngram":
        assert stats.accepted > 0, "the toy drafter is right often enough for a test"


def test_bad_words_of_token_ids_are_those_words():
    expected = alone(make("a", bad_words=["ab", "c"], max_tokens=60), slots=3)
    ids = toy_codec().encode_words(["ab", "c"])
    assert alone(make("a", bad_word_ids=ids, max_tokens=60), slots=3) == expected
    assert expected != alone(make("a", max_tokens=60), slots=3)


def test_tokens_behind_a_stop_word_are_not_accepted():
    """A worker's totals say so too."""
    text = alone(make("a", end_ids=frozenset()), slots=3)[0]
    for end in range(5, 40, 3):
        scheduler = Scheduler(ToyEngine(slots=3, quality=1.0), LIMITS, only(PLANS["beam"]))
        sequence = make("a", end_ids=frozenset(), stop_words=[text[end - 2 : end]])
        run(scheduler, [sequence])
        stats, totals = sequence.stats, scheduler.totals
        assert stats.output_tokens == 1 + stats.steps + stats.accepted
        assert (totals.accepted, totals.output_tokens) == (stats.accepted, stats.output_tokens)


@pytest.mark.parametrize("plan", ["merged", "beam", "ngram"])
@pytest.mark.parametrize("vocab_size", [2, 111])
def test_mixed_batches_joining_and_leaving(plan, vocab_size):
    rng = np.random.default_rng(5)
    sequences, joins, expected = [], [], {}
    for key in range(9):
        options = {
            "sampling": list(SAMPLINGS.values())[key % len(SAMPLINGS)],
            "prompt": rng.integers(1, vocab_size, rng.integers(1, 70)).tolist(),
            "max_tokens": int(rng.integers(1, 30)),
            "end_ids": frozenset({0}) if vocab_size > 2 else frozenset(),
        }
        expected[key] = alone(make(key, **options), slots=3, vocab_size=vocab_size)
        sequences.append(make(key, stream=key % 2 == 0, **options))
        joins.append(int(rng.integers(0, 12)))
    engine = ToyEngine(slots=3, vocab_size=vocab_size, candidates=2 if vocab_size == 2 else 6)
    limits = Limits(slots=3, max_len=256, max_tree=24, prefill_chunk=16, max_queue=9)
    results = run(Scheduler(engine, limits, only(PLANS[plan])), sequences, joins)
    assert {key: result[:4] for key, result in results.items()} == expected


class ChoosingEngine(ToyEngine):
    """Logits and hidden states are tensors, and tokens are chosen where these are, as on a GPU."""

    def __init__(self, **options):
        super().__init__(**options)
        self.given = Counter[bool]()

    def execute(self, batch, samplers=None, meanwhile=None):
        logits, hidden = super().execute(batch)
        self.given.update(sampler is not None for sampler in samplers)
        return sample(
            torch.from_numpy(logits), batch, samplers, Results(torch.device("cpu")), draws=True
        ), torch.from_numpy(hidden)

    def draft(self, batch, noise=None):
        assert isinstance(batch.features, torch.Tensor)
        return super().draft(replace(batch, features=batch.features.numpy()))


@pytest.mark.parametrize("plan", ["merged", "beam cut", "ngram"])
def test_an_engine_that_chooses_tokens_changes_nothing(plan):
    """Mixed batches of requests that need no more than tokens and of those that need logits."""
    found = []
    for kind in (ToyEngine, ChoosingEngine):
        rng, sequences = np.random.default_rng(6), []
        for key in range(2 * len(SAMPLINGS) + 2):
            options = {"sampling": list(SAMPLINGS.values())[key // 2 % len(SAMPLINGS)], "max_tokens": 20 + key}
            options |= {"return_log_probs": True} if key % 4 == 3 else {"return_log_probs": False}
            options |= {"bad_words": ["ab", "c"]} if key > 11 else {}
            prompt = rng.integers(1, 111, rng.integers(1, 40)).tolist()
            sequences.append(make(key, prompt=prompt, stream=key % 3 == 0, **options))
        engine = kind(slots=3)
        scheduler = Scheduler(engine, replace(LIMITS, max_queue=20), only(PLANS[plan]))
        results = run(scheduler, sequences, joins=[0, 0, 0, *range(len(sequences) - 3)])
        found.append({key: result[:4] for key, result in results.items()})
    assert found[0] == found[1]
    assert min(engine.given[True], engine.given[False]) > 50


class IngestingEngine(ToyEngine):
    """Its drafter reads pairs: each must follow from the one before it, also across drafts."""

    reads_context = True

    def __init__(self, **options):
        super().__init__(**options)
        self.expected = np.full(self.cache.shape[:2], -1, np.int64)

    def copy(self, source, target, rows):
        super().copy(source, target, rows)
        self.expected[target, : rows + 1] = self.expected[source, : rows + 1]

    def draft(self, batch, noise=None):
        states = [int(high) << 16 | int(low) for high, low in batch.features.tolist()]
        for b, slot in enumerate(batch.slots.tolist()):
            for pair, row in enumerate(range(*batch.row_offsets[b : b + 2].tolist()), int(batch.cache_lengths[b])):
                assert self.expected[slot, pair] == states[row] or not pair
                self.expected[slot, pair + 1] = _mix(states[row], int(batch.tokens[row]))
        last = batch.row_offsets[1:] - 1
        return super().draft(DraftBatch.of_roots(batch.features[last], batch.tokens[last]))


@pytest.mark.parametrize("kind", [ToyEngine, IngestingEngine])
def test_drafters_read_the_hidden_states_of_the_accepted_text(kind):
    """A drafter that knows the target is always right then, whatever else runs, joins and leaves."""
    engine = kind(slots=3, quality=1.0, width=1)
    scheduler = Scheduler(engine, replace(LIMITS, max_queue=9), only(PLANS["chain"]))
    prompts = [list(range(1, 4 + 9 * key)) for key in range(7)]
    sequences = [make(key, prompt=prompt, end_ids=frozenset()) for key, prompt in enumerate(prompts)]
    run(scheduler, sequences, joins=[0, 0, 1, 3, 9, 9, 14])
    assert {sequence.stats.steps for sequence in sequences} == {-(-39 // (1 + engine.length))}


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_requests_of_different_methods_share_steps(sampling):
    """Each gets its own method's drafts, by what runs in all, and its own text."""

    class ThreeDrafters(ToyEngine):
        @property
        def drafters(self):
            return dict.fromkeys(("beam", "best_first", "busy"), self)

    table = BudgetTable(entries=[BudgetEntry(running=1, nodes=6), BudgetEntry(running=3, nodes=0)])
    plans = {name: PLANS[name] for name in ("beam", "best_first", "ngram")}
    plans["busy"] = MethodConfig(construction="best_first", budget=table)
    methods = [None, "busy", "ngram", "auto_regressive", "best_first", "beam"]
    limits = Limits(slots=6, max_len=256, max_tree=24, prefill_chunk=16)
    options = {"sampling": SAMPLINGS[sampling], "end_ids": frozenset(), "max_tokens": 30}
    prompts = [list(range(1, 9 + place)) for place in range(len(methods))]
    sequences = [
        make(place, prompt=prompt, method=method, **options)
        for place, (prompt, method) in enumerate(zip(prompts, methods, strict=True))
    ]
    results = run(Scheduler(ThreeDrafters(slots=6), limits, plans), sequences, joins=[0, 0, 0, 1, 1, 2])
    used = ["beam", "busy", "ngram", None, "best_first", "beam"]
    for place, (prompt, method) in enumerate(zip(prompts, used, strict=True)):
        apart = Scheduler(ToyEngine(slots=6), limits, only(plans.get(method)))
        expected = run(apart, [make(place, prompt=prompt, **options)])[place]
        assert results[place][:4] == expected[:4]
        drafted, drafted_apart = results[place][4].drafted, expected[4].drafted
        assert drafted == drafted_apart if method != "busy" else drafted < drafted_apart / 2, method
    assert results[1][4].drafted < results[4][4].drafted, "three and more run nearly all the time"


def test_a_long_prompt_stalls_no_one_by_more_than_a_chunk():
    engine = ToyEngine(slots=3)
    scheduler = Scheduler(engine, LIMITS, only(PLANS["best_first"]))
    scheduler.submit(make("short", prompt=[1, 2], stream=True))
    scheduler.step()
    scheduler.submit(make("long", prompt=[3] * 150))
    for _ in range(8):
        outputs = scheduler.step()
        assert [output.key for output in outputs] == ["short"]
        assert engine.rows_per_step[-1] <= 10 + LIMITS.prefill_chunk


def test_one_drafter_call_per_step_and_none_without_budget():
    table = BudgetTable(
        entries=[BudgetEntry(running=1, nodes=6), BudgetEntry(running=2, nodes=3), BudgetEntry(running=3, nodes=0)]
    )  # fmt: skip
    engine = ToyEngine(slots=3)
    scheduler = Scheduler(engine, LIMITS, only(MethodConfig(construction="best_first", budget=table)))
    for key in range(2):
        scheduler.submit(make(key, prompt=[key + 1], end_ids=frozenset()))
    scheduler.step()
    scheduler.step()
    assert (engine.draft_calls, engine.rows_per_step[-1]) == (1, 2 * 4)
    scheduler.submit(make(3, prompt=[9], end_ids=frozenset()))
    scheduler.step()
    scheduler.step()
    assert (engine.draft_calls, engine.rows_per_step[-1]) == (2, 3)


@pytest.mark.parametrize(
    ("running", "temperature", "expected"),
    [(1, 0.0, (6, 0)), (3, 0.0, (2, 0.3)), (9, 0.0, (2, 0.3)), (1, 0.69, (6, 0)), (2, 0.7, (1, 0)), (5, 1.3, (1, 0.2))],
)
def test_budget_lookup(running, temperature, expected):
    """Of the nearest temperature below, of the next larger load."""
    table = BudgetTable(
        entries=[
            BudgetEntry(running=4, nodes=2, chance=0.3),
            BudgetEntry(running=1, temperature=0.7, nodes=4),
            BudgetEntry(running=1, nodes=6),
            BudgetEntry(running=4, temperature=0.7, nodes=1, chance=0.2),
            BudgetEntry(running=2, temperature=0.7, nodes=1),
            BudgetEntry(running=2, nodes=3),
        ]
    )
    assert table.lookup(running, temperature) == expected


def test_cancellation_within_one_step_frees_the_slot():
    scheduler = Scheduler(ToyEngine(slots=3), LIMITS, only(PLANS["merged"]))
    for key in range(4):
        scheduler.submit(make(key, prompt=[key + 1] * 5, end_ids=frozenset(), max_tokens=200))
    scheduler.step()
    scheduler.step()
    assert (scheduler.status().running, scheduler.status().waiting) == (3, 1)
    scheduler.cancel(1)
    scheduler.cancel(3)
    scheduler.cancel("unknown")
    outputs = {output.key: output for output in scheduler.step()}
    assert {key: output.finish_reason for key, output in outputs.items()} == {1: "cancelled", 3: "cancelled"}
    assert outputs[1].token_ids
    assert not outputs[3].token_ids
    assert (scheduler.status().running, scheduler.status().waiting) == (2, 0)
    expected = alone(make(0, prompt=[1] * 5, end_ids=frozenset(), max_tokens=200), slots=3)
    assert run(scheduler, [])[0][:4] == expected


def test_a_full_queue_is_refused_at_once():
    scheduler = Scheduler(ToyEngine(slots=3), LIMITS)
    for key in range(LIMITS.slots + LIMITS.max_queue):
        scheduler.submit(make(key))
    with pytest.raises(Overloaded, match=f"{LIMITS.max_queue} requests wait"):
        scheduler.submit(make("one too many"))
    assert len(run(scheduler, [])) == 7


def test_slots_are_reused_without_leftovers():
    scheduler = Scheduler(ToyEngine(slots=1), Limits(1, 256, 24, 16), only(PLANS["merged"]))
    sequences = [make(key, prompt=[key + 1] * (40 - 9 * key), max_tokens=9 + key) for key in range(4)]
    results = run(scheduler, sequences)
    for key in range(4):
        again = make(key, prompt=[key + 1] * (40 - 9 * key), max_tokens=9 + key)
        assert results[key][:4] == alone(again, slots=1)


def test_statistics_add_up():
    scheduler = Scheduler(ToyEngine(slots=3), LIMITS, only(PLANS["beam"]))
    stats = run(scheduler, [make("a", end_ids=frozenset(), max_tokens=50)])["a"][4]
    totals = dict(scheduler.totals)
    assert stats.prompt_tokens == 29
    assert stats.output_tokens == 50 == totals["output_tokens"]
    assert stats.accepted == sum(stats.accepted_by_depth) == totals["accepted"]
    assert stats.rows_executed == 29 + stats.steps + stats.drafted == totals["rows_executed"]
    assert stats.acceptance_length == pytest.approx((stats.steps + stats.accepted) / stats.steps)
    assert 0 < totals["engine_s"] < totals["step_s"]


@pytest.mark.parametrize("plan", ["beam", "merged", "ngram"])
def test_depths_count_where_the_accepted_path_could_have_gone_on(plan):
    offered, accepted = Counter(), Counter()

    def observe(tree, place, verdict):
        parents = {parent for _, parent, _ in tree.nodes[place]}
        for depth, node in enumerate(verdict.path, 1):
            offered[depth] += node in parents
            accepted[depth - 1] += 1

    scheduler = Scheduler(ToyEngine(slots=3), LIMITS, only(PLANS[plan]), observe=observe)
    stats = run(scheduler, [make("a", end_ids=frozenset(), max_tokens=150)])["a"][4]
    depths = range(1, len(stats.offered_by_depth) + 1)
    assert stats.offered_by_depth == [offered[depth] for depth in depths]
    assert stats.accepted_by_depth == [accepted[depth] for depth in depths]
    assert sum(offered.values()) == sum(stats.offered_by_depth)


def test_the_last_tokens_are_not_overdrafted():
    engine = ToyEngine(slots=3, quality=1.0)
    run(Scheduler(engine, LIMITS, only(PLANS["best_first"])), [make("a", max_tokens=2, end_ids=frozenset())])
    assert engine.rows_per_step[-1] == 1


@pytest.mark.parametrize("end_id", [None, -1, 5])
def test_end_ids(end_id):
    sequence = make("a", end_id=end_id, sampling={"temperature": 3.0, "seed": 1}, max_tokens=200)
    _, tokens, _, reason, stats = run(Scheduler(ToyEngine(slots=3), LIMITS, only(PLANS["beam"])), [sequence])["a"]
    assert reason == ("length" if end_id == -1 else "stop")
    assert (0 if end_id is None else end_id) not in tokens or end_id == -1
    assert stats.output_tokens == len(tokens)


@pytest.mark.parametrize(
    ("construction", "ngram", "budget"), [("best_first", False, 20), ("best_first", True, 5), ("beam", True, 5)]
)
def test_sequences_share_the_rows_of_a_step(construction, ngram, budget):
    """The budgets are kept together, and not by each alone; no tree outgrows the engine's."""
    drafted = []
    plans = only(MethodConfig(construction=construction, ngram=ngram, tree_budget=budget))
    engine = ToyEngine(slots=3, sharpness=1.0)
    scheduler = Scheduler(engine, LIMITS, plans, None, lambda tree, b, verdict: drafted.append(tree.sizes - 1))
    run(scheduler, [make(key, prompt=[*range(1, 4 * key + 2)] * 3) for key in range(1, 4)])
    assert all(sizes.sum() <= budget * len(sizes) and sizes.max() < LIMITS.max_tree for sizes in drafted)
    assert max(sizes.max() for sizes in drafted) > budget
    assert all(sizes.max() <= budget for sizes in drafted if len(sizes) == 1)
