"""Ids that the tokenizer does not know are never sampled, with and without drafts, and have no probability."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from redraft.bundle.method import MethodConfig
from redraft.engines import load_engine
from redraft.request import GenerateRequest
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Scheduler
from tests.engines.scheduling import CODEC, TABLE
from tests.engines.tiny import METHOD, VOCAB, chain, make_batch, tiny_bundle

UNKNOWN = ((5, 9), (VOCAB // 2, VOCAB))
KNOWN = {token for token in range(VOCAB) if not any(first <= token < end for first, end in UNKNOWN)}
SAMPLINGS = [{}, {"temperature": 2.0}, {"temperature": 2.0, "top_k": 40}, {"repetition_penalty": 2.0}]


@pytest.fixture(scope="module", params=["openvino", "torch"])
def bundle(request, target, tmp_path_factory):
    if request.param == "openvino":
        return request.getfixturevalue("fp32_bundle")
    return tiny_bundle(tmp_path_factory.mktemp("torch"), target, backend="torch")


def engine_of(bundle, unknown):
    info = bundle.config.target.model_copy(update={"unknown_tokens": unknown})
    return load_engine(dataclasses.replace(bundle, config=bundle.config.model_copy(update={"target": info})))


def answers(engine, plan: MethodConfig | None) -> list[list[int]]:
    limits = Limits(slots=3, max_len=80, max_tree=40, prefill_chunk=16)
    unknown = frozenset(range(VOCAB)) - KNOWN
    drafted: set[int] = set()

    def observe(tree, place, _):
        drafted.update(token for token, _, _ in tree.nodes[place][1:])

    plans = {METHOD: plan} if plan else {}
    scheduler = Scheduler(engine, limits, plans, observe=observe, unknown_tokens=unknown)
    tokens: dict[int, list[int]] = {}
    for key in range(8):
        sampling = SAMPLINGS[key % len(SAMPLINGS)] | {"seed": key}
        request = GenerateRequest(id=str(key), input_ids=[1, 6, key], max_tokens=30, sampling=sampling)
        scheduler.submit(RequestState(key, request, request.input_ids, CODEC, frozenset()))
        tokens[key] = []
    while not scheduler.idle:
        for output in scheduler.step():
            tokens[output.key] += output.token_ids
    assert drafted <= KNOWN
    assert bool(drafted) == bool(plan)
    return list(tokens.values())


def test_they_are_never_sampled(bundle):
    plan = MethodConfig(construction="best_first", ngram=True, budget=TABLE)
    engine = engine_of(bundle, ())
    assert not {token for answer in answers(engine, None) for token in answer} <= KNOWN
    engine.close()
    engine = engine_of(bundle, UNKNOWN)
    plain = answers(engine, None)
    assert {token for answer in plain for token in answer} <= KNOWN
    assert answers(engine, plan) == plain
    engine.close()


def test_their_probability_goes_to_the_others(bundle):
    batch = make_batch([chain(0, [], [1, 6, 3], causal=True)])
    logits = [np.array(engine_of(bundle, unknown).execute(batch)[0], np.float32) for unknown in ((), UNKNOWN)]
    known = sorted(KNOWN)
    np.testing.assert_array_equal(logits[0][:, known], logits[1][:, known])
    assert (np.delete(logits[1], known, axis=1) == -math.inf).all()
