"""Rejection-type verification: the law of the token that comes out is the target's, exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.decoding.construction import Draws
from redraft.decoding.noise import coin
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.decoding.rejection import k_seq, k_seq_gamma, multi_round, recursive_rejection, verify
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import VERIFIERS, PairingError, check_pairing
from redraft.request import SamplingConfig
from tests.decoding.laws import drawn, independent, law, marginal, outcome, without_replacement

RULES = {
    "recursive_rejection": (recursive_rejection, without_replacement),
    "multi_round": (multi_round, independent),
    "k_seq": (k_seq, independent),
}
MOST_DRAWS = {2: 6, 3: 4, 4: 4, 5: 3}


def log(p) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64)).astype(np.float32)


def softmax(logits) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


@st.composite
def cases(draw):
    """q over a small vocabulary, p over some of its tokens in any order, both with zeros and of any sharpness."""
    vocab_size = draw(st.integers(2, 5))
    ids = draw(st.permutations(range(vocab_size)))[: draw(st.integers(1, vocab_size))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def logits(size):
        sharpness = draw(st.sampled_from([0.0, 1.0, 5.0, 300.0]))
        values = rng.normal(size=size) * sharpness
        hidden = rng.random(size) < draw(st.sampled_from([0.0, 0.5]))
        return np.where(hidden & (np.arange(size) != rng.integers(size)), -np.inf, values)

    count = draw(st.integers(1, MOST_DRAWS[vocab_size]))
    return softmax(logits(vocab_size)), logits(len(ids)).astype(np.float32), np.array(ids, np.int32), count


@pytest.mark.parametrize("name", RULES)
@given(case=cases())
@settings(max_examples=150)
def test_the_law_of_the_token_is_the_targets(name, case):
    rule, draw_law = RULES[name]
    q, log_probs, ids, count = case
    got, rate = marginal(rule, draw_law, q, log_probs, count, ids)
    assert np.abs(got - q).max() < 1e-12
    assert (got[q == 0] == 0).all()
    assert -1e-12 <= rate <= 1 + 1e-12


EDGES = {
    "p is q": ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], 3),
    "disjoint supports": ([0.0, 0.0, 0.4, 0.6], [0.7, 0.3, 0.0, 0.0], 3),
    "a draft probability of 1": ([0.2, 0.5, 0.3], [0.0, 1.0, 0.0], 2),
    "a target probability of 1": ([0.0, 1.0, 0.0], [0.6, 0.1, 0.3], 2),
    "both sure of different tokens": ([0.0, 1.0], [1.0, 0.0], 2),
    "a token outside of the draft": ([0.2, 0.3, 0.5], [0.5, 0.5, 0.0], 2),
    "more draws than tokens": ([0.25, 0.75], [0.9, 0.1], 4),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", RULES)
def test_edges(name, edge):
    rule, draw_law = RULES[name]
    q, p, count = EDGES[edge]
    got, rate = marginal(rule, draw_law, np.array(q), log(p), count)
    assert np.abs(got - q).max() < 1e-7, "p is float32"
    if edge == "p is q":
        assert rate == pytest.approx(1, abs=1e-6)
    if edge.startswith(("disjoint", "both sure")):
        assert rate == 0


@pytest.mark.parametrize("name", RULES)
def test_temperature_001_and_a_vocabulary_of_111(name):
    rule, draw_law = RULES[name]
    rng = np.random.default_rng(4)
    for temperature, count in ((0.01, 2), (1.0, 2), (1.0, 1)):
        q = softmax(rng.normal(size=111) * 2 / temperature)
        ids = rng.permutation(111)[:30].astype(np.int32)
        p_logits = np.log(q[ids] + 1e-300) + rng.normal(size=30)
        got, _ = marginal(rule, draw_law, q, p_logits, count, ids)
        assert np.abs(got - q).max() < 1e-12


def test_an_underflowed_draft_probability_is_no_trouble():
    q = np.array([0.0, 0.0, 1.0])
    chances, residual = outcome(recursive_rejection, q, drawn([0, 2, 1], [0.0, -4e4, -5e5]))
    assert (chances, residual.tolist()) == ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0])


def test_recursive_rejection_by_hand():
    """q = (.5, .5, 0), p = (.1, .3, .6), drawn 2, 1: after 2 goes, q stays (0 at 2) and p is (.25, .75)."""
    q = np.array([0.5, 0.5, 0.0])
    chances, residual = outcome(recursive_rejection, q, drawn([2, 1], log([0.1, 0.3, 0.6])))
    left = np.array([0.4, 0.2, 0.0]) / 0.6
    assert chances == pytest.approx([0.0, left[1] / 0.75])
    assert residual == pytest.approx([1.0, 0.0, 0.0])


def test_k_seq_accepts_at_least_the_share_that_spectr_promises():
    """K-SEQ accepts with 1 - (1 - beta)^K, at least (1 - 1/e) of the best possible; its gamma is minimal."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
        gamma = k_seq_gamma(p, q, 3)
        best = 1 - max(
            p[list(chosen)].sum() ** 3 - q[list(chosen)].sum()
            for chosen in ([i for i in range(4) if bits >> i & 1] for bits in range(16))
        )
        beta = np.minimum(p, q / gamma).sum()
        _, rate = marginal(k_seq, independent, q, log(p), 3)
        assert rate == pytest.approx(1 - (1 - beta) ** 3, abs=1e-6)
        assert best * (1 - 1 / np.e) - 1e-9 <= rate <= best + 1e-9
        assert 1 - (1 - beta) ** 3 == pytest.approx(gamma * beta, rel=1e-5) or gamma == pytest.approx(1)


def test_without_replacement_accepts_more_than_independent_draws():
    rng = np.random.default_rng(1)
    for _ in range(20):
        p, q = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
        rates = [marginal(*RULES[name], q, log(p), 3)[1] for name in ("recursive_rejection", "multi_round")]
        assert rates[0] > rates[1]


@pytest.mark.parametrize(("name", "wrong_draws"), [("recursive_rejection", independent), ("k_seq", without_replacement),
                                                   ("multi_round", without_replacement)])  # fmt: skip
def test_refused_pairings_are_biased_indeed(name, wrong_draws):
    q, p = np.array([0.5, 0.3, 0.2]), log([0.15, 0.25, 0.6])
    assert np.abs(marginal(RULES[name][0], wrong_draws, q, p, 2)[0] - q).max() > 0.02


def test_repeated_draws_must_be_kept():
    """The trap: independent draws, repeats dropped, as a tree of unique nodes alone would have them."""
    q, p = np.array([0.1, 0.2, 0.3, 0.4]), log([0.7, 0.1, 0.1, 0.1])
    for name in ("multi_round", "k_seq"):
        total = np.zeros(4)
        for places, chance in independent(p, 3):
            total += chance * law(RULES[name][0], q, drawn(dict.fromkeys(places), p))[0]
        assert np.abs(total - q).max() > 0.01


def two_levels(rule_draws) -> TokenTree:
    """Root 9 with children 0 and 1, the first with a child 1 of its own."""
    tree = TokenTree.from_nodes([[(9, -1, 0.0), (0, 0, 0.0), (1, 0, 0.0), (1, 1, 0.0)]])
    first, second = rule_draws
    tree.draws = [{0: drawn(first, log([0.6, 0.4])), 1: drawn(second, log([0.2, 0.8]))}]
    tree.draws[0][1].children = [3] * len(second)
    return tree


def test_the_walk_follows_accepted_draws_and_takes_the_bonus_from_the_residual():
    logits = log([[0.3, 0.7], [0.5, 0.5], [0.9, 0.1], [0.4, 0.6]])
    tree = two_levels(([0, 1], [1]))
    seen = set()
    for seed in range(300):
        sampler = Sampler(SamplingConfig(temperature=1.0), [9], seed=seed)
        verdict = verify(recursive_rejection, tree, 0, logits, sampler)
        seen.add(tuple(verdict.path))
        assert sampler.position == len(verdict.tokens) == len(verdict.path)
        assert verdict.tokens[:-1] == tree.tokens[verdict.path[1:]].tolist()
        if coin(seed, 0, 1) < 0.5:
            assert verdict.path[:2] == [0, 1], "the first draw is accepted with chance .3 / .6"
        else:
            assert verdict.path == [0, 2], "then the residual is all on the second"
    assert seen == {(0, 1), (0, 1, 3), (0, 2)}


def test_the_walk_stops_after_an_end_token():
    tree = two_levels(([0], [1]))
    logits = log([[1.0, 0.0]] * 4)
    for end_ids, path in (((), [0, 1]), ((0,), [0])):
        sampler = Sampler(SamplingConfig(temperature=1.0), [9], end_ids)
        verdict = verify(multi_round, tree, 0, logits, sampler)
        assert (verdict.path, verdict.tokens[0]) == (path, 0)


def test_a_greedy_request_gets_the_greedy_tokens():
    logits = np.random.default_rng(2).normal(size=(4, 2)).astype(np.float32)
    for rule in (recursive_rejection, multi_round, k_seq):
        sampler = Sampler(SamplingConfig(), [9])
        verdict = verify(rule, two_levels(([0, 1], [1])), 0, logits, sampler)
        assert verdict.tokens == [int(logits[node].argmax()) for node in verdict.path]


def test_which_pairings_work():
    allowed = {
        "gumbel_top_k": {"recursive_rejection"},
        "stochastic_beam": {"recursive_rejection"},
        "independent": {"multi_round", "k_seq"},
        "random_chain": {"rejection", "recursive_rejection", "multi_round", "k_seq"},
        "beam": set(), "best_first": set(), "chain": set(),
    }  # fmt: skip
    assert set(RANDOM_CONSTRUCTIONS) < set(allowed)
    for verifier in VERIFIERS.values():
        assert set(verifier.reasons) == set(Draws) - set(verifier.lossless), "a reason for each that is refused"
    for construction, verifiers in allowed.items():
        for name, verifier in VERIFIERS.items():
            if verifier.merges:
                check_pairing(construction, name, merged=True)
            elif name in verifiers:
                check_pairing(construction, name)
                with pytest.raises(PairingError, match="merging forgets"):
                    check_pairing(construction, name, merged=True)
            else:
                with pytest.raises(PairingError, match=f"'{name}' does not go with '{construction}': it "):
                    check_pairing(construction, name)
