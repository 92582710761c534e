"""The reference backend: the module's numbers from an exported program, and the same as the embedded engine's.

The slow case would catch a drafter's program in another precision than its bundle.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch

from redraft.batch import DraftBatch
from redraft.engines import load_engine
from tests.engines.scheduling import scores
from tests.engines.tiny import (
    LIMITS,
    METHOD,
    VOCAB,
    chain,
    expected,
    make_batch,
    random_tree,
    scores_of,
    tiny_bundle,
    tiny_drafter_of,
    tiny_target,
)


@pytest.fixture(scope="module")
def engine(bundle):
    return load_engine(bundle)


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


def test_prompts_are_scored_as_the_module_says(engine, target):
    """Where a step with a chunk fits a step's bucket, too, since all its rows have logits."""
    text, values = scores(engine)
    assert values == pytest.approx(scores_of(target, text), abs=1e-4)


def test_drafts_are_those_of_the_embedded_engine(engine, fp32_bundle):
    hidden = np.random.default_rng(1).standard_normal((2, 96), dtype=np.float32)
    batch = DraftBatch.of_roots(hidden, np.array([3, 110], np.int32))
    ours, reference = load_engine(fp32_bundle).drafters[METHOD].draft(batch), engine.drafters[METHOD].draft(batch)
    present = np.isfinite(reference.log_probs)
    np.testing.assert_array_equal(ours.candidates[present], reference.candidates[present])
    np.testing.assert_allclose(ours.log_probs, reference.log_probs, atol=1e-4)
    np.testing.assert_array_equal(ours.parents[:, 1], reference.parents[:, 1])


def test_bf16(tmp_path, target):
    """Logits, and drafts from hidden states that are on the device: log-probabilities of all that the drafter knows sum
    to 1, as they are float32's."""
    engine = load_engine(tiny_bundle(tmp_path, tiny_target(), backend="torch", precision="bf16", candidates=50))
    step = [chain(0, [], [5, 6, 7], causal=True)]
    logits, hidden = engine.execute(make_batch(step))
    want = expected(target, step)[0]
    assert np.abs(logits - want).max() < 0.1 * np.abs(want).max()
    assert hidden.dtype == torch.bfloat16
    drafted = engine.drafters[METHOD].draft(DraftBatch.of_roots(hidden[1:], np.array([3, 110], np.int32)))
    np.testing.assert_allclose(np.exp(drafted.log_probs[:, 0, 0]).sum(-1), 1, atol=1e-5)


@pytest.mark.slow
def test_programs_of_drafters_are_in_the_bundles_precision(tmp_path):
    """Half the bytes; what the kernels and the tables of token info need in float32 stays so."""
    sizes = {}
    for precision in ("fp32", "bf16"):
        target = tiny_target()
        trained = tiny_drafter_of(target, "hidden_state")
        bundle = tiny_bundle(tmp_path / precision, target, "torch", precision, trained=trained)
        program = torch.export.load(bundle.path / f"drafter.{METHOD}.pt2")
        tensors = program.state_dict | {n: x for n, x in program.constants.items() if isinstance(x, torch.Tensor)}
        floats = {name: x for name, x in tensors.items() if x.is_floating_point()}
        kept = {name for name, x in floats.items() if x.dtype == torch.float32}
        sizes[precision] = sum(x.numel() * x.element_size() for name, x in floats.items())
        if precision == "bf16":
            assert {name.split(".")[-1] for name in kept} == {"kind_0", "scales"}
    assert sizes["bf16"] < 0.6 * sizes["fp32"]


def test_programs_hold_weights_and_no_caches(tmp_path):
    """Those that they were exported with are as large as the limits ask."""
    few, many = (
        tiny_bundle(tmp_path / str(slots), tiny_target(), "torch", limits=LIMITS.model_copy(update={"slots": slots}))
        for slots in (2, 200)
    )
    for program in few.path.glob("*.pt2"):
        assert (many.path / program.name).stat().st_size < program.stat().st_size + 10_000


def test_closing_frees_what_drafters_hold(tmp_path, target):
    trained = tiny_drafter_of(target, "eagle")
    engine = load_engine(tiny_bundle(tmp_path, target, "torch", trained=trained))
    held = [weakref.ref(tensor) for tensor in engine.drafters[METHOD].caches]
    assert held
    gc.disable()
    try:
        engine.close()
        assert not any(reference() is not None for reference in held)
    finally:
        gc.enable()
