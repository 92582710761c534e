"""The scheduler on real engines whose drafters keep a context: the text is the auto-regressive one.

The slow cases would catch a setting of a drafter, or the torch backend, that changes a text.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from redraft.bundle.method import MethodConfig
from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import Verdict
from redraft.engines import load_engine
from redraft.request import GenerateRequest
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Scheduler
from tests.conftest import slow
from tests.engines.scheduling import CODEC, TABLE, generate, requests
from tests.engines.tiny import LIMITS, METHOD, VOCAB, tiny_bundle, tiny_drafter_of


@pytest.fixture(scope="module")
def expected(target, tmp_path_factory) -> dict[int, list[int]]:
    engine = load_engine(tiny_bundle(tmp_path_factory.mktemp("ar"), target, drafts=False))
    return generate(engine, None)[0]


@pytest.mark.parametrize("variant", ["hidden_state", "eagle", "draft_lm", slow("eagle3")])
def test_the_text_is_the_autoregressive_one(target, tmp_path, expected, variant):
    engine = load_engine(tiny_bundle(tmp_path, target, trained=tiny_drafter_of(target, variant)))
    plans = {
        "best_first": MethodConfig(construction="best_first", budget=TABLE),
        "merged": MethodConfig(construction="beam", ngram=True, tree_budget=12),
    }
    for name, plan in plans.items():
        tokens, scheduler = generate(engine, plan, cancelled=(1, 2))
        assert scheduler.totals.drafted > scheduler.totals.accepted, name
        for key, ids in tokens.items():
            assert ids == expected[key], (name, key)
        assert len(tokens) >= 5


@pytest.mark.parametrize("backend", ["openvino", slow("torch")])
def test_drafting_again_from_chains_changes_no_text(target, tmp_path, expected, backend):
    trained = tiny_drafter_of(target, "hidden_state")
    engine = load_engine(tiny_bundle(tmp_path, target, backend, trained=trained, beam_length=4))
    drafted, draft = Counter[int | None](), engine.drafters[METHOD].draft

    def counting(batch, noise):
        drafted[skip_above] += len(batch.slots)
        return draft(batch, noise)

    engine.drafters[METHOD].draft = counting
    for skip_above in (None, 1):
        lyanna = {"resample_above": 0, "resample_budget": 4, "skip_above": skip_above}
        plan = MethodConfig(construction="best_first", ngram=True, budget=TABLE, **lyanna)
        tokens, _ = generate(engine, plan, cancelled=(1, 2))
        for key, ids in tokens.items():
            assert ids == expected[key], (skip_above, key)
        assert len(tokens) >= 5
    assert 0 < drafted[1] < drafted[None], "where enough is left of a chain nothing new is drafted"


@pytest.mark.parametrize("skip_above", [None, 0])
def test_reused_tokens_are_those_that_only_the_chain_held(target, tmp_path, skip_above):
    """A chain that knows the text, beside drafts that never do, or in place of one."""
    trained = tiny_drafter_of(target, "hidden_state", hot=None)
    engine = load_engine(tiny_bundle(tmp_path, target, trained=trained, beam_length=4))

    def run(plan: MethodConfig | None) -> RequestState:
        request = GenerateRequest(id="a", input_ids=[5, 6], max_tokens=20)
        running.append(RequestState("a", request, [5, 6], CODEC, frozenset()))
        scheduler = Scheduler(engine, Limits(1, 80, 40, 16), {METHOD: plan} if plan else {})
        scheduler.submit(running[-1])
        while not scheduler.idle:
            outputs = scheduler.step()
        text[:] = outputs[0].token_ids
        return running[-1]

    def knowing(batch, noise):
        calls.append(len(batch.slots))
        drafted = draft(batch, noise)
        drafted.candidates[:] = next(token for token in range(VOCAB) if token not in text)
        for logits, token in zip(drafted.raw_logits[0], text[20 - running[-1].remaining :], strict=False):
            logits[:] = -50
            logits[token] = 50
        return drafted

    running, text, calls, draft = list[RequestState](), list[int](), list[int](), engine.drafters[METHOD].draft
    run(None)
    engine.drafters[METHOD].draft = knowing
    lyanna = {"resample_above": 0, "resample_budget": 4, "skip_above": skip_above}
    plan = MethodConfig(construction="best_first", tree_budget=6, **lyanna)
    stats = run(plan).stats
    assert stats.reused == stats.accepted > 8
    assert calls == [1] * (stats.steps if skip_above is None else stats.steps // 2)


def test_fused_nodes_displace_no_new_draft(target, tmp_path):
    """With n-grams off all draft nodes of a first draft come from the drafter, as many as its budget allows."""
    trained = tiny_drafter_of(target, "hidden_state", hot=None)
    engine = load_engine(tiny_bundle(tmp_path, target, trained=trained, beam_length=4))
    sizes, plain = Counter[int](), Counter[int]()
    for found, above in ((sizes, 0), (plain, None)):
        plan = MethodConfig(construction="best_first", tree_budget=6, resample_above=above, resample_budget=3)
        observe = partial(_count_drafted, found)
        scheduler = Scheduler(engine, Limits(1, 80, 40, 16), {METHOD: plan}, observe=observe)
        request = GenerateRequest(id="a", input_ids=[5, 6], max_tokens=30)
        scheduler.submit(RequestState("a", request, [5, 6], CODEC, frozenset()))
        while not scheduler.idle:
            scheduler.step()
    assert max(plain) == 6
    assert max(sizes) == 9


def _count_drafted(found: Counter[int], tree: TokenTree, place: int, _: Verdict) -> None:
    found[len(tree.nodes[place]) - 1] += 1


@pytest.mark.parametrize(("variant", "first"), [("hidden_state", 1), ("draft_lm", 0)])
def test_every_pair_is_ingested_once_and_forgotten(target, tmp_path, variant, first):
    """The engine is given each position's hidden state and the token that follows, in order, and nothing is kept."""
    engine = load_engine(tiny_bundle(tmp_path, target, trained=tiny_drafter_of(target, variant)))
    sequences = requests()
    ingested, given = dict[int, list[int]](), list[tuple[RequestState, list[int], int]]()
    draft = engine.drafters[METHOD].draft

    def recorded(batch, noise):
        for b, slot in enumerate(batch.slots.tolist()):
            begin, end = batch.row_offsets[b : b + 2]
            length = int(batch.cache_lengths[b])
            kept = ingested.setdefault(slot, [])
            assert length in (0, len(kept))
            del kept[length:]
            kept += batch.tokens[begin:end].tolist()
            owner = next(s for s in sequences if s.slot == slot and not s.finish_reason)
            assert owner.pairs.features == owner.pairs.tokens == []
            given.append((owner, kept.copy(), owner.request.max_tokens - owner.remaining))
        return draft(batch, noise)

    engine.drafters[METHOD].draft = recorded
    limits = Limits(slots=2, max_len=LIMITS.max_len, max_tree=LIMITS.max_tree, prefill_chunk=LIMITS.prefill_chunk)
    scheduler = Scheduler(engine, limits, {METHOD: MethodConfig(construction="best_first", tree_budget=7)})
    for sequence in sequences:
        scheduler.submit(sequence)
    texts = {}
    while not scheduler.idle:
        texts |= {output.key: output.token_ids for output in scheduler.step()}
    assert len(ingested) == 2
    for owner, kept, generated in given:
        assert kept == [*owner.prompt.tolist(), *texts[owner.key][:generated]][first:]
