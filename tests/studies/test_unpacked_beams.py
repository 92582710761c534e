"""Beams with and without packing: the same tokens accepted in the same steps, by trees of different sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.bundle.method import MethodConfig
from redraft.decoding.construction import CONSTRUCTIONS
from redraft.decoding.packing import pack_beams
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import Verdict, walk
from redraft.request import GenerateRequest, SamplingConfig
from redraft.request_state import RequestState
from redraft.scheduling.scheduler import Limits, Scheduler
from studies.speed.unpacked_beams import BEAM_UNPACKED, register, unpacked
from tests.toy_engine import ToyEngine, only, toy_codec

VOCAB = 4
CODEC = toy_codec()


def prefixes(tree: TokenTree, sequence: int) -> list[tuple[int, ...]]:
    """Each node's tokens from below the root to it."""
    found: list[tuple[int, ...]] = [()]
    for token, parent, _ in tree.nodes[sequence][1:]:
        found.append((*found[parent], token))
    return found


def logits_after(prefix: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng([seed, *prefix]).normal(size=VOCAB).astype(np.float32)


def walked(tree: TokenTree, sequence: int, seed: int, sampling: SamplingConfig) -> Verdict:
    logits = np.stack([logits_after(prefix, seed) for prefix in prefixes(tree, sequence)])
    return walk(tree, sequence, logits, Sampler(sampling, [1], end_ids=(0,), seed=seed))


def longest_match(beams: np.ndarray, tokens: list[int]) -> int:
    """The most leading tokens that a beam shares with `tokens`."""
    matches = [np.cumprod(beam[: len(tokens)] == tokens[: len(beam)]).sum() for beam in beams]
    return max(map(int, matches), default=0)


@settings(max_examples=150)
@given(st.data())
def test_the_walk_accepts_the_longest_matching_beam(data):
    """Random beams with many repeats, of odd sizes, some absent; greedy and sampled."""
    batch, width, length = (data.draw(st.integers(1, most)) for most in (3, 7, 5))
    rng, seed = np.random.default_rng(data.draw(st.integers(0, 9999))), data.draw(st.integers(0, 99))
    beams = rng.integers(0, VOCAB, (batch, width, length), dtype=np.int32)
    for beam in beams.reshape(-1, length):  # up to a random depth, the target's most likely tokens
        for depth in range(rng.integers(length + 1)):
            beam[depth] = logits_after(tuple(beam[:depth].tolist()), seed).argmax()
    log_probs = -np.cumsum(np.ones(beams.shape, np.float32), axis=2)
    kept = [data.draw(st.integers(1, width)) for _ in range(batch)]
    for b, count in enumerate(kept):
        log_probs[b, count:, -1] = -np.inf
    roots = np.arange(batch, dtype=np.int32)
    packed, apart = pack_beams(roots, beams, log_probs), unpacked(roots, beams, log_probs)
    assert apart.sizes.tolist() == [1 + count * length for count in kept]
    sampling = data.draw(st.sampled_from([SamplingConfig(), SamplingConfig(temperature=1.0, seed=3)]))
    for b, count in enumerate(kept):
        own = prefixes(apart, b)
        leaves = [tuple(beam) for beam in beams[b, :count].tolist()]
        assert [own[1 + beam * length + length - 1] for beam in range(count)] == leaves
        with_packing, without = (walked(tree, b, seed, sampling) for tree in (packed, apart))
        assert without.tokens == with_packing.tokens
        assert len(without.path) == len(with_packing.path)
        assert [own[node] for node in without.path] == [tuple(without.tokens[:i]) for i in range(len(without.path))]
        assert without.path == sorted(without.path)
        accepted = len(without.path) - 1
        if without.tokens[-1] != 0:
            assert accepted == longest_match(beams[b, :count], without.tokens)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 8}, {"repetition_penalty": 1.3}])
def test_the_scheduler_takes_the_same_steps(sampling, monkeypatch):
    """Three sequences at a time over a cache in which every wrong row changes the text."""
    monkeypatch.setitem(CONSTRUCTIONS, BEAM_UNPACKED, None)  # so that it is gone after the test
    register()
    found = {}
    for construction in ("beam", BEAM_UNPACKED):
        plan = MethodConfig(construction=construction, tree_budget=20)
        limits = Limits(slots=3, max_len=256, max_tree=21, prefill_chunk=16)
        scheduler = Scheduler(ToyEngine(width=5, length=4), limits, only(plan))
        for key in range(5):
            prompt = list(range(1, 9 + key))
            request = GenerateRequest(id=str(key), input_ids=prompt, max_tokens=30 + key, sampling=sampling)
            scheduler.submit(RequestState(key, request, prompt, CODEC, frozenset({0})))
        tokens: dict = {}
        stats: dict = {}
        while not scheduler.idle:
            for output in scheduler.step():
                tokens[output.key] = tokens.get(output.key, []) + output.token_ids
                stats[output.key] = output.stats
        counts = {key: (own.steps, own.offered_by_depth, own.accepted_by_depth) for key, own in stats.items()}
        found[construction] = tokens, counts, scheduler.totals
    (tokens, counts, packed), (same_tokens, same_counts, apart) = found.values()
    assert same_tokens == tokens
    assert same_counts == counts
    assert packed.accepted > 10
    assert apart.rows_executed > 1.2 * packed.rows_executed
