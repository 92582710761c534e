"""Sampling and verification: known answers, distributions with stated power, and what refuses to pair."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.decoding import verification
from redraft.decoding.construction import CONSTRUCTIONS, Construction, Draws
from redraft.decoding.noise import coin, race
from redraft.decoding.sampling import Distribution, Sampler
from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import PairingError, Verifier, check_pairing, walk
from redraft.plugins.operators.sampling.reference import winner
from redraft.request import SamplingConfig
from tests.decoding.laws import chi_square


def sampler(prompt=(), end_ids=(), bad_words=(), **config) -> Sampler:
    return Sampler(SamplingConfig(**config), list(prompt), end_ids, bad_words)


def probabilities(logits: np.ndarray, **config) -> np.ndarray:
    return sampler(**config).distribution(logits).at(np.arange(len(logits)))


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The filtered distribution by full sorting."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    logits = np.where(weights < min_p, -np.inf, logits)
    order = np.argsort(-logits, kind="stable")
    keep = order[:top_k] if top_k else order
    probs = np.zeros(len(logits))
    probs[keep] = np.exp((logits[keep].astype(np.float64) - logits.max()) / temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    size = int(np.searchsorted(np.cumsum(probs[order]), top_p)) + 1
    probs[order[size:]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize("vocab_size", [2, 111, 49152])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(
    "config",
    [{"temperature": 1.0}, {"temperature": 0.5, "top_k": 2}, {"temperature": 1.0, "top_p": 0.95},
     {"temperature": 1.0, "top_p": 0.3}, {"temperature": 2.0, "top_k": 40, "top_p": 0.7}, {"temperature": 0.01},
     {"temperature": 1.0, "min_p": 0.1}, {"temperature": 2.0, "min_p": 0.3}, {"temperature": 1.0, "min_p": 1.0},
     {"temperature": 1.5, "min_p": 0.02, "top_k": 9, "top_p": 0.8}],
)  # fmt: skip
def test_probabilities_are_those_of_full_sorting(vocab_size, spread, config):
    logits = (np.random.default_rng(vocab_size).normal(size=vocab_size) * spread).astype(np.float32)
    got, expected = probabilities(logits, **config), reference(logits, **config)
    assert np.abs(got - expected).max() < 2e-5
    seen = [int((probs > 1e-7).sum()) for probs in (got, expected)]
    assert abs(seen[0] - seen[1]) <= max(2, vocab_size // 5000)


@settings(max_examples=100)
@given(
    st.sampled_from([1, 2, 31, 32, 33, 111, 2049, 5003]),
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4),
    st.sampled_from(["all", "the last", "few", "equal"]),
    st.sampled_from([{"temperature": 1.0}, {"temperature": 0.01}, {"temperature": 1.3, "top_k": 40, "top_p": 0.9}]),
)
def test_a_token_is_the_first_of_the_race(vocab_size, seed, positions, likely, config):
    """Whatever the order of the positions; and a distribution of these weights is drawn from by the same noise."""
    rng, chooser = np.random.default_rng(seed), sampler(seed=seed, **config)
    logits = rng.normal(size=vocab_size).astype(np.float32) * (likely != "equal")
    logits[-1] += 9 * (likely == "the last")
    logits[: vocab_size // 2 * (likely == "few")] = -np.inf
    distribution = chooser.distribution(logits)
    ids = np.arange(vocab_size) if distribution.ids is None else distribution.ids
    for chooser.position in positions:
        expected = winner(ids, distribution.weights, race(seed, chooser.position, ids))
        assert chooser.choose(logits) == chooser.draw(distribution) == expected


@pytest.mark.parametrize(
    "config",
    [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9}, {"temperature": 1.4, "min_p": 0.2}],
)
def test_two_tokens_of_a_request_have_the_targets_joint_law(config):
    """200,000 requests of two tokens, the second's logits by the first, in numpy; the sampler gives some of them."""
    vocab_size, requests = 7, 200_000
    logits = (1.5 * np.random.default_rng(8).normal(size=(1 + vocab_size, vocab_size))).astype(np.float32)
    laws = np.array([probabilities(row, **config) for row in logits])
    seeds, ids = np.arange(requests, dtype=np.uint64)[:, None], np.arange(vocab_size)
    with np.errstate(divide="ignore"):
        first = (race(seeds, 20, ids) / laws[0]).argmin(axis=1)
        second = (race(seeds, 21, ids) / laws[1 + first]).argmin(axis=1)
    expected = laws[0][:, None] * laws[1:]
    counts = np.bincount(first * vocab_size + second, minlength=vocab_size**2)
    assert chi_square(counts, requests * expected.ravel()) < 4.5
    for seed in range(1000):
        chooser = sampler(seed=seed, **config)
        for chooser.position, row, token in ((20, 0, first[seed]), (21, 1 + first[seed], second[seed])):
            assert chooser.choose(logits[row]) == token


def test_a_large_flat_vocabulary_is_drawn_from_evenly():
    """Counted by where tokens stand, and by their place in a block of noise and in a group of blocks."""
    chooser, flat, draws = sampler(seed=5, temperature=1.0), np.zeros(151_936, np.float32), 6400
    tokens = np.empty(draws, np.int64)
    for chooser.position in range(draws):
        tokens[chooser.position] = chooser.choose(flat)
    for parts, count in ((tokens * 64 // len(flat), 64), (tokens % 4, 4), (tokens % 64, 64)):
        assert chi_square(np.bincount(parts, minlength=count), np.full(count, draws / count)) < 4.5
    assert len(np.unique(tokens)) > draws - 250, "about 135 repeats"


@pytest.mark.parametrize("kind", [np.float64, "strided", "read-only"])
def test_logits_of_any_kind(kind):
    logits = np.random.default_rng(4).normal(size=111).astype(np.float32)
    given_ones = logits.astype(kind) if kind is np.float64 else np.repeat(logits, 2)[::2]
    given_ones.flags.writeable = kind != "read-only"
    chosen = [sampler(seed=seed, temperature=1.0, top_p=0.9) for seed in range(40)]
    assert [one.choose(given_ones) for one in chosen] == [one.choose(logits) for one in chosen]


@pytest.mark.parametrize("config", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_infinite_logits_choose_the_largest(config):
    """Penalties may make them. Where nothing is left, the token is one of the vocabulary."""
    logits = np.array([0, 1, np.inf, 2, -np.inf], np.float32)
    config |= {"temperature": 1.0, "seed": 1}
    assert sampler(**config).choose(logits) == 2
    assert 0 <= sampler(**config).choose(np.full(5, -np.inf, np.float32)) < 5
    assert 0 <= sampler(**config).choose(np.full(5, np.nan, np.float32)) < 5


@pytest.mark.parametrize("ids", [None, [1, 4, 6]])
def test_a_distribution_gives_and_takes_probabilities_of_some_tokens(ids):
    """Tokens that cannot be drawn have none, and get none."""
    weights = np.array([2.0, 1.0, 5.0], np.float32) if ids else np.array([0, 2.0, 0, 0, 1.0, 0, 5.0], np.float32)
    distribution = Distribution(None if ids is None else np.array(ids), weights, 8.0)
    everything, some = np.arange(7), np.array([6, 3, 1], np.int32)
    assert distribution.at(some).tolist() == [0.625, 0, 0.25]
    distribution.put(some, np.array([0.125, 0, 0.0]))
    assert distribution.at(everything).tolist() == [0, 0, 0, 0, 0.125, 0, 0.125]
    assert {sampler(temperature=1.0, seed=seed).draw(distribution) for seed in range(50)} == {4, 6}
    distribution.put(np.array([4, 6]), np.zeros(2))
    assert distribution.at(everything).tolist() == [0, 0, 0, 0, 0.125, 0, 0.125], "kept where nothing would be left"


@pytest.mark.parametrize("config", [{}, {"top_p": 0.9}, {"top_k": 2000, "top_p": 0.99}])
def test_probabilities_add_up_in_float64(config):
    """It would catch a mass that float32 sums lose, which a rejection verifier takes for that of other tokens."""
    logits = np.random.default_rng(2).normal(size=49_152).astype(np.float32)
    distribution = sampler(temperature=1.0, **config).distribution(logits)
    found = distribution.at(np.arange(len(logits)))
    assert found.dtype == np.float64
    exact = distribution.weights.astype(np.float64)
    np.testing.assert_allclose(found[found > 0], exact / exact.sum(), rtol=2e-7)
    assert abs(1 - found.sum()) < 2e-7


def test_ties_are_kept_by_lowest_id():
    logits = np.array([1, 3, 3, 3, 0, 2], np.float32)
    assert np.flatnonzero(probabilities(logits, temperature=1.0, top_k=2)).tolist() == [1, 2]
    flat = np.zeros(4, np.float32)
    assert np.flatnonzero(probabilities(flat, temperature=1.0, top_p=0.5)).tolist() == [0, 1]


@pytest.mark.parametrize(
    "config",
    [{}, {"temperature": 0}, {"temperature": 0.9, "top_k": 1}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.9},
     {"temperature": 9e-5, "top_p": 0.9}],
)  # fmt: skip
def test_greedy_configurations(config):
    """Whatever filters there are: only a temperature samples."""
    chosen = sampler(**config)
    assert chosen.greedy
    assert chosen.choose(np.array([0, 2, 1], np.float32)) == 1


@pytest.mark.parametrize("absent", [{"top_p": 0}, {"top_k": 0}, {"top_p": 0, "top_k": 0}, {"top_p": 1}])
def test_filters_of_no_effect(absent):
    """Clients of TensorRT-LLM send zeros by default."""
    logits = np.random.default_rng(1).normal(size=111).astype(np.float32)
    expected = probabilities(logits, temperature=0.7)
    assert np.count_nonzero(expected) == 111
    np.testing.assert_array_equal(probabilities(logits, temperature=0.7, **absent), expected)


def test_biases_come_before_penalties_and_do_not_undo_what_is_forbidden():
    logits = np.array([2.0, -2.0, 1.0, 0.5, 0.0, 0.0], np.float32)
    before = logits.copy()
    biased = sampler(
        prompt=[0], end_ids={4}, bad_words=[[5]], repetition_penalty=2.0, min_length=1,
        logit_bias={0: 1.0, 1: 100.0, 3: -100.0, 4: 100.0, 5: 100.0},
    )  # fmt: skip
    assert biased.process(logits).tolist() == [1.5, 98.0, 1.0, -99.5, -np.inf, -np.inf]
    assert (logits == before).all()
    biased.accept(1)
    assert biased.process(logits).tolist() == [1.5, 49.0, 1.0, -99.5, 100.0, -np.inf]


def test_penalties_count_prompt_and_output_and_leave_the_input_alone():
    logits = np.array([2.0, -2.0, 1.0, 0.5], np.float32)
    before = logits.copy()
    penalized = sampler(prompt=[0, 1, 1], repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    penalized.accept(2)
    assert penalized.process(logits).tolist() == [2 / 2 - 0.75, -4 - 1.25, 0.5 - 0.75, 0.5]
    assert (logits == before).all()


def test_a_prompt_that_only_the_repetition_penalty_counts():
    """OpenAI's penalties are of what was generated; token 0 was only asked, 1 asked and answered."""
    config = {"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    penalized = sampler(prompt=[0, 0, 1], penalize_prompt=False, **config)
    for token in (1, 2):
        penalized.accept(token)
    logits = np.array([2.0, 2.0, 1.0, 0.5], np.float32)
    assert penalized.process(logits).tolist() == [1.0, 1 - 0.75, 0.5 - 0.75, 0.5]


def test_min_length_holds_back_end_tokens():
    held = sampler(end_ids={1}, min_length=2)
    logits = np.array([0, 5, 1], np.float32)
    assert held.choose(logits) == 2
    held.accept(2)
    held.accept(2)
    assert held.choose(logits) == 1


def test_bad_words_of_one_and_more_tokens():
    words = sampler(prompt=[3, 1], bad_words=[[2], [1, 0]])
    logits = np.array([5, 3, 9, 4], np.float32)
    assert words.choose(logits) == 3
    words.accept(3)
    assert words.choose(logits) == 0


WORDS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6)


@given(WORDS, st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=5))
def test_what_would_complete_a_bad_word_is_banned_and_nothing_else(bad_words, prompt, answer):
    words = sampler(prompt=prompt, bad_words=bad_words)
    for token in answer:
        words.accept(token)
    text = [*prompt, *answer]
    banned = {
        word[-1] for word in bad_words if text[len(text) - len(word) + 1 :] == word[:-1] and len(text) + 1 >= len(word)
    }
    assert set(np.flatnonzero(np.isneginf(words.process(np.zeros(4, np.float32))))) == banned


def test_bad_words_that_a_prompt_begins_which_is_shorter_than_others():
    words = sampler(prompt=[3, 1], bad_words=[[2, 2, 2, 2], [3, 1, 0]])
    assert words.choose(np.array([5, 3, 2, 4], np.float32)) == 3


TREE = TokenTree.from_nodes([[(0, -1, 0.0), (1, 0, -0.1), (2, 0, -0.2), (1, 1, -0.3), (2, 1, -0.4), (0, 2, -0.5)]])
RNG = np.random.default_rng(3)
NODE_LOGITS = RNG.normal(size=(6, 4)).astype(np.float32) * 1.5


def joint_counts(verify, trials: int) -> tuple[np.ndarray, np.ndarray]:
    """How often (first, second token) came out of a step, second drawn alone where the first left the tree; and how
    often it should."""
    first = reference(NODE_LOGITS[0], 0.9)
    nodes = {1: 1, 2: 2}
    expected = np.array([first[t] * reference(NODE_LOGITS[nodes.get(t, 5)], 0.9) for t in range(4)])
    counts = np.zeros((4, 4))
    for seed in range(trials):
        chooser = sampler(seed=seed, temperature=0.9)
        tokens = verify(TREE, 0, NODE_LOGITS, chooser).tokens
        second = tokens[1] if len(tokens) > 1 else chooser.choose(NODE_LOGITS[nodes.get(tokens[0], 5)])
        counts[tokens[0], second] += 1
    return counts.ravel(), expected.ravel() * trials


def test_sampled_walk_has_the_targets_joint_distribution():
    assert chi_square(*joint_counts(walk, 6000)) < 4.5


def biased_walk(tree, sequence, logits, chooser):
    """A planted bias: in one of twelve draws the best child is accepted where the target chose another token."""
    verdict = walk(tree, sequence, logits, chooser)
    if coin(chooser.seed, 99, 1) < 1 / 12:
        verdict.tokens[0] = tree.nodes[sequence][1][0]
        del verdict.tokens[1:]
    return verdict


def test_the_joint_distribution_test_has_power():
    assert chi_square(*joint_counts(biased_walk, 6000)) > 9


def test_walk_equals_choosing_one_by_one_and_reports_the_path():
    for seed in range(200):
        verdict = walk(TREE, 0, NODE_LOGITS, sampler(temperature=1.2, seed=seed))
        chooser, node, tokens = sampler(temperature=1.2, seed=seed), 0, []
        for at in verdict.path:
            assert at == node
            tokens.append(chooser.choose(NODE_LOGITS[node]))
            chooser.accept(tokens[-1])
            children = {token: n for n, (token, parent, _) in enumerate(TREE.nodes[0]) if parent == node}
            node = children.get(tokens[-1], -1)
        assert node == -1
        assert verdict.tokens == tokens


def test_walk_stops_after_an_end_token():
    logits = np.full((6, 4), -9, np.float32)
    logits[:, 1] = 9
    assert walk(TREE, 0, logits, sampler()).path == [0, 1, 3]
    assert walk(TREE, 0, logits, sampler(end_ids={1})).path == [0]


def test_walk_takes_tokens_that_a_plain_sampler_chose():
    logits = RNG.normal(size=(6, 4)).astype(np.float32)
    for seed in range(50):
        chooser = sampler(temperature=1.2, seed=seed)
        chosen = np.zeros(6, np.int32)
        for node, depth in enumerate((0, 1, 1, 2, 2, 2)):
            chooser.position = depth
            chosen[node] = chooser.choose(logits[node])
        verdicts = [walk(TREE, 0, given, sampler(temperature=1.2, seed=seed)) for given in (logits, chosen)]
        assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize(
    ("made", "plain"),
    [
        (sampler(), True),
        (sampler(temperature=0.7, top_k=9, top_p=0.9), True),
        (sampler(repetition_penalty=1.1), False),
        (sampler(presence_penalty=0.1), False),
        (sampler(frequency_penalty=0.1), False),
        (sampler(bad_words=[[3]]), False),
        (sampler(logit_bias={3: 1.0}), False),
        (sampler(logit_bias={}), True),
        (sampler(min_length=2), True),
        (sampler(min_length=2, end_ids={1}), False),
    ],
)
def test_plain_samplers(made, plain):
    assert made.plain == plain


def test_a_sampler_is_plain_when_the_minimum_length_is_reached():
    held = sampler(min_length=2, end_ids={1})
    for expected in (False, False, True):
        assert held.plain == expected
        held.accept(0)


def test_pairings():
    for construction in ("beam", "best_first", "chain"):
        for verifier in ("greedy", "sampled_walk"):
            check_pairing(construction, verifier, merged=True)
    with pytest.raises(PairingError, match="unknown construction 'oak': expected one of beam"):
        check_pairing("oak", "greedy")
    with pytest.raises(PairingError, match="unknown verification 'hope': expected one of greedy"):
        check_pairing("beam", "hope")


def test_unsound_pairings_are_refused_with_the_reason(monkeypatch):
    reason = "its acceptance rule needs random draws, and top-k trees have none"
    picky = Verifier("picky", walk, {Draws.WITHOUT_REPLACEMENT}, {Draws.TOP: reason})
    monkeypatch.setitem(verification.VERIFIERS, "picky", picky)
    gumbel = Construction("gumbel", Draws.WITHOUT_REPLACEMENT, SimpleNamespace())
    monkeypatch.setitem(CONSTRUCTIONS, "gumbel", gumbel)
    with pytest.raises(PairingError, match=reason):
        check_pairing("beam", "picky")
    with pytest.raises(PairingError, match="'independent': it is not known to be lossless on independent random draws"):
        check_pairing("independent", "picky")
    check_pairing("gumbel", "picky")
    with pytest.raises(PairingError, match="merging forgets the order of the draws"):
        check_pairing("gumbel", "picky", merged=True)
