"""Real engines whose sequences begin after rows of earlier ones."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.method import MethodConfig
from redraft.drafting.method import Method
from redraft.engines import load_engine
from redraft.scheduling.scheduler import Limits
from tests.engines.ranks.test_parallel import RANDOM
from tests.engines.tiny import LIMITS as LIMITS_OF_BUNDLES
from tests.engines.tiny import bundle_of_methods, caches_of, tiny_bundle, tiny_drafter_of, tiny_of
from tests.mutants import Mutant, planted
from tests.scheduling.reuse import converse

LIMITS = Limits(slots=3, max_len=80, max_tree=40, prefill_chunk=16, max_queue=99)
BUDGET = BudgetTable.constant(7)
PLANS = {
    "recurrent": MethodConfig(construction="best_first", ngram=True, budget=BUDGET),
    "hidden_state": MethodConfig(construction="best_first", budget=BUDGET, resample_above=0, skip_above=1),
    "draft_lm": MethodConfig(**RANDOM["draft_lm"], verification="rejection", budget=BUDGET),
}
"""A drafter without a context, one that skips drafts, and one whose context begins with the text and whose draws decide
the answer."""


@pytest.fixture(scope="module")
def engine(target, tmp_path_factory):
    configured = {"recurrent": {}, "hidden_state": {"resample_above": 0}, "draft_lm": RANDOM["draft_lm"]}
    methods = {name: (tiny_drafter_of(target, name), plan) for name, plan in configured.items()}
    return load_engine(bundle_of_methods(tmp_path_factory.mktemp("bf16"), target, methods, precision="bf16"))


def test_answers_are_those_without_reuse(engine):
    """Bit for bit: the operators are row-invariant."""
    share, copies = converse(engine, LIMITS, PLANS, seed=1, count=60)
    assert share > 0.25
    assert copies > 5


def test_draws_that_decide_the_answer_need_all_pairs(engine):
    """A rejection verifier's answers are others where its drafter does without the pairs of another method's rows."""
    shipped, mutant = "not self._verifier.merges", "False"

    def check() -> None:
        for seed in range(2, 8):
            converse(engine, LIMITS, {"draft_lm": PLANS["draft_lm"]}, seed, count=60)

    with planted(Mutant("pairs skipped", Method.pairs, shipped, mutant, case="")), pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize(("backend", "tolerance"), [("openvino", 0.0), ("torch", 1e-4)])
def test_answers_are_those_without_reuse_where_caches_have_lost_rows(tmp_path, monkeypatch, backend, tolerance):
    """Of layers with a window of 9: texts of up to 120 tokens, and their trees, over 64 rows."""
    monkeypatch.setattr("redraft.compiler.bundle.RING_SPARE", 0)
    sizes = LIMITS_OF_BUNDLES.model_copy(update={"max_len": 120, "max_tree": 14})
    engine = load_engine(tiny_bundle(tmp_path, tiny_of("gemma3"), backend, limits=sizes))
    assert {cache.shape[2] for cache in caches_of(engine)} == {64, 134}
    limits = Limits(3, 120, 14, 16, max_queue=99, window=9, window_rows=64)
    share, copies = converse(engine, limits, {"tiny": PLANS["recurrent"]}, 2, 50, tolerance)
    assert share > 0.15
    assert copies > 3


def test_answers_are_those_without_reuse_with_the_torch_backend(target, tmp_path):
    """Up to the order of sums."""
    engine = load_engine(tiny_bundle(tmp_path, target, "torch", trained=tiny_drafter_of(target, "eagle")))
    share, copies = converse(engine, LIMITS, {"tiny": PLANS["recurrent"]}, 1, 30, tolerance=1e-4)
    assert share > 0.25
    assert copies > 3


@pytest.mark.parametrize("backend", ["openvino", "torch"])
def test_a_copy_is_of_all_caches_and_no_other_rows(target, tmp_path, backend):
    engine = load_engine(tiny_bundle(tmp_path, target, backend, trained=tiny_drafter_of(target, "eagle")))
    (drafter,) = engine.drafters.values()
    own = caches_of(engine)
    drafters = drafter.caches.values() if backend == "openvino" else drafter.caches
    caches = [np.asarray(one) for one in (*own, *drafters)]
    rng, rows, before = np.random.default_rng(0), 13, []
    for cache in caches:
        cache[:] = rng.normal(size=cache.shape)
        before.append(cache.copy())
    engine.copy(2, 7, rows)
    for place, (cache, old) in enumerate(zip(caches, before, strict=True)):
        count = rows + (place >= len(own))
        old[7, :, :count] = old[2, :, :count]
        np.testing.assert_array_equal(cache, old)
    assert len(caches) > len(own)
