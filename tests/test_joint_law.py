"""Random constructions through the scheduler: lossless in law; and token for token where that can be.

The slow cases would catch a bias at an edge: supports that are narrow, disjoint or of two tokens, and trees that are
always cut.
"""

from __future__ import annotations

from collections import Counter

import pytest

from redraft.bundle.method import MethodConfig
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Scheduler
from tests.conftest import slow_but
from tests.joint_law import CASES, KINDS, THRESHOLD, DisjointEngine, check, deviation, generate
from tests.scheduling.test_scheduler import SAMPLINGS, alone, make, run
from tests.toy_drafter import DrawingToyEngine
from tests.toy_engine import ToyEngine, only

QUICK = (
    *("RSD-C", "RSD-S", "multi-round", "K-SEQ", "speculative sampling", "RSD-S merged with n-grams"),
    *("random chain, recursive rejection", "RSD-S of two tokens", "K-SEQ of 111 tokens", "K-SEQ, a narrow support"),
)
REQUESTS = 300
"""Of each kind, or of one as many as of all; `tests.mutants` shows what this finds."""
OF_TWO_TOKENS = 3200
"""In a vocabulary of two, where a bias is small."""
PLANS = {
    "gumbel_top_k": (3, 2, 1),
    "stochastic_beam": (4, 4, 4),
    "independent": (3, 3, 3),
    "random_chain": (1, 1, 1, 1),
}
LIMITS = Limits(slots=3, max_len=256, max_tree=24, prefill_chunk=16, max_queue=9)


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_the_joint_law_is_the_targets(name):
    case = CASES[name]
    kinds = KINDS if case.vocab_size == 4 else ("plain",)
    total = OF_TWO_TOKENS if case.vocab_size == 2 else REQUESTS * len(KINDS)
    answers, scheduler, sizes = generate(case, total // len(kinds), kinds)
    assert len(answers) == total
    for kind in kinds:
        assert check(case, kind, answers) < THRESHOLD, kind
    totals = scheduler.totals
    if case.engine is DisjointEngine:
        assert (totals.accepted > 0) == (case.construction == "gumbel_top_k")
    else:
        assert totals.accepted > 0.2 * totals.sequence_steps, "verification has something to verify"
    assert totals.sequence_steps > 1.8 * total
    assert sum(sizes[size] for size in range(1, case.cut + 1)) > REQUESTS, "trees are cut"
    assert case.budget < 9 or case.cut == 1 or sum(sizes[size] for size in range(case.cut + 1, 16)) > REQUESTS


def engine(construction: str, support: int = 12, **options) -> DrawingToyEngine:
    return DrawingToyEngine(construction, PLANS[construction], support, slots=3, **options)


def plan(construction: str, verification: str, budget: int = 12, **options) -> MethodConfig:
    return MethodConfig(
        construction=construction,
        verification=verification,
        tree_budget=budget,
        levels=PLANS[construction],
        support=12,
        **options,
    )


def batch() -> list[RequestState]:
    """One request of each sampling, with words that must not come and prompts of odd lengths."""
    return [
        make(
            name, sampling=sampling, prompt=list(range(1, 5 + 7 * place)), max_tokens=30 + place, bad_words=["ab", "c"]
        )
        for place, (name, sampling) in enumerate(SAMPLINGS.items())
    ]


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("construction", PLANS)
def test_the_sampled_walk_over_random_trees_equals_autoregressive(construction, merged):
    scheduler = Scheduler(engine(construction), LIMITS, only(plan(construction, "sampled_walk", ngram=merged)))
    results = run(scheduler, batch(), joins=[0, 0, 1, 4, 4, 9, 9, 30, 30])
    for sequence in batch():
        assert results[sequence.key][:4] == alone(sequence, slots=3)
    assert scheduler.totals.accepted > 0


@pytest.mark.parametrize("budget", [4, 12])
@pytest.mark.parametrize(
    ("construction", "verification"),
    [("gumbel_top_k", "recursive_rejection"), ("stochastic_beam", "recursive_rejection"), ("independent", "k_seq"),
     ("independent", "multi_round"), ("random_chain", "rejection")],
)  # fmt: skip
def test_a_request_does_not_depend_on_its_neighbours_and_greedy_ones_are_exact(construction, verification, budget):
    def outputs(sequences, joins=None):
        scheduler = Scheduler(engine(construction), LIMITS, only(plan(construction, verification, budget)))
        return run(scheduler, sequences, joins)

    together = outputs(batch(), [0, 0, 1, 4, 4, 9, 9, 30, 30])
    for sequence in batch():
        key = sequence.key
        assert together[key][:4] == outputs([sequence])[key][:4]
    for key in ("greedy", "penalties", "greedy biases"):
        sequence = next(sequence for sequence in batch() if sequence.key == key)
        assert together[key][:4] == alone(sequence, slots=3)
        assert together[key][4].accepted > 0


@pytest.mark.parametrize(
    ("construction", "verification"),
    [("stochastic_beam", "recursive_rejection"), ("independent", "k_seq"), ("gumbel_top_k", "sampled_walk")],
)
def test_greedy_trees_are_cut_to_their_likeliest_nodes(construction, verification):
    """Beside a request that samples, whose draws are kept and cut in draw order where the verifier weighs them."""

    def first_trees(budget):
        seen: list = []
        cutting = plan(construction, verification, budget)
        scheduler = Scheduler(engine(construction), LIMITS, only(cutting), observe=lambda *step: seen.append(step))
        run(scheduler, [make("a", prompt=[1, 2, 3]), make("b", {"temperature": 1.0, "seed": 1}, prompt=[1, 2])])
        return seen[0][0]

    whole_tree, cut_tree = first_trees(12), first_trees(4)
    whole, cut = whole_tree.nodes[0], cut_tree.nodes[0]
    assert len(whole) > 6
    assert len(cut) == 5
    assert {score for _, _, score in cut} == set(sorted((score for _, _, score in whole), reverse=True)[:5])
    assert cut_tree.draws[0] == {}
    assert bool(cut_tree.draws[1]) == (verification != "sampled_walk")


def test_a_vocabulary_of_two_at_temperature_001():
    for construction, verification in (("gumbel_top_k", "recursive_rejection"), ("independent", "k_seq")):
        toy = DrawingToyEngine(construction, PLANS[construction], 2, vocab_size=2, slots=3)
        two = MethodConfig(
            construction=construction, verification=verification, tree_budget=9, levels=PLANS[construction], support=2
        )
        sequence = make("a", sampling={"temperature": 0.01, "seed": 1}, prompt=[1], end_ids=frozenset())
        got = run(Scheduler(toy, LIMITS, only(two)), [sequence])["a"]
        cold = make("a", prompt=[1], end_ids=frozenset())
        assert got[1] == alone(cold, slots=3, vocab_size=2)[1], "at temperature 0.01 the most probable tokens"


def test_plans_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"'gumbel_top_k' needs levels .* got levels \(\) and support 8"):
        MethodConfig(construction="gumbel_top_k", verification="recursive_rejection", support=8).check()
    with pytest.raises(ValueError, match=r"got levels \(2, 0\) and support 0"):
        MethodConfig(construction="stochastic_beam", verification="recursive_rejection", levels=(2, 0)).check()
    with pytest.raises(ValueError, match="'independent' needs a drafter that draws at random"):
        Scheduler(ToyEngine(slots=3), LIMITS, only(plan("independent", "k_seq")))


def test_deviations_are_standard_normal():
    law = {(0,): 0.5, (1,): 0.5}
    assert deviation(Counter({(0,): 520, (1,): 480}), law) == pytest.approx(0.8, abs=0.2)
    assert deviation(Counter({(0,): 420, (1,): 580}), law) > THRESHOLD
    with pytest.raises(AssertionError, match="impossible outcomes"):
        deviation(Counter({(2,): 1}), law)
