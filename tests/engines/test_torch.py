"""The reference backend: the module's numbers from an exported program, and the same as the embedded engine's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from redraft.engines import load_engine
from redraft.engines.interface import DraftBatch
from tests.engines.tiny import METHOD, VOCAB, chain, expected, make_batch, random_tree, tiny_bundle, tiny_target


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return load_engine(tiny_bundle(tmp_path_factory.mktemp("torch"), tiny_target(), backend="torch"))


def test_trees_prefill_and_commits_agree_with_the_module(engine, target):
    rng = np.random.default_rng(0)
    contexts = {slot: rng.integers(0, VOCAB, n).tolist() for slot, n in ((1, 12), (4, 5))}
    engine.execute(make_batch([chain(slot, [], tokens, causal=True) for slot, tokens in contexts.items()]))
    first = random_tree(rng, 1, contexts[1], 35)
    step = [first, chain(7, [], rng.integers(0, VOCAB, 16).tolist(), causal=True), random_tree(rng, 4, contexts[4], 3)]
    logits, hidden = engine.execute(make_batch(step))
    want = expected(target, step)
    np.testing.assert_allclose(logits, want[0], atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(hidden, want[1], atol=1e-4, rtol=1e-5)

    path = first.ancestors(34)[::-1]
    accepted = contexts[1] + [first.tokens[row] for row in path]
    following = dataclasses.replace(random_tree(rng, 1, accepted, 4), commit=path)
    np.testing.assert_allclose(
        engine.execute(make_batch([following]))[0], expected(target, [following])[0], atol=1e-4, rtol=1e-5
    )


def test_drafts_are_those_of_the_embedded_engine(engine, fp32_bundle):
    hidden = np.random.default_rng(1).standard_normal((2, 96), dtype=np.float32)
    batch = DraftBatch.of_roots(hidden, np.array([3, 110], np.int32))
    ours, reference = load_engine(fp32_bundle).drafters[METHOD].draft(batch), engine.drafters[METHOD].draft(batch)
    present = np.isfinite(reference.log_probs)
    np.testing.assert_array_equal(ours.candidates[present], reference.candidates[present])
    np.testing.assert_allclose(ours.log_probs, reference.log_probs, atol=1e-4)
    np.testing.assert_array_equal(ours.parents[:, 1], reference.parents[:, 1])


def test_bf16(tmp_path, target):
    engine = load_engine(tiny_bundle(tmp_path, tiny_target(), backend="torch", precision="bf16", drafts=False))
    step = [chain(0, [], [5, 6, 7], causal=True)]
    logits, hidden = engine.execute(make_batch(step))
    assert hidden is None
    want = expected(target, step)[0]
    assert np.abs(logits - want).max() < 0.1 * np.abs(want).max()
