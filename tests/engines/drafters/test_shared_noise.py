"""Drafters' networks that take the target's noise, in the engines."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from redraft.batch import DraftBatch, DraftCandidates, SharedNoise
from redraft.bundle.method import MethodConfig
from redraft.engines import load_engine
from redraft.engines.host_buffers import NoiseBuffers
from redraft.model_defs.drafters.draft_lm import DraftLM
from redraft.model_defs.export.drafter import export_drafter_native, export_resampler_native
from redraft.model_defs.loops.beam_search import BeamSearch
from redraft.plugins.operators.perturbed_topk.reference import perturbed_topk
from tests.decoding.shared_noise import generate
from tests.engines.tiny import METHOD, VOCAB, tiny_bundle, tiny_drafter_of, tiny_target

BACKENDS = ["openvino", "torch"]
SUPPORT = 37
NOISE = SharedNoise(
    seeds=np.array([2**63 + 7, 5, 12], np.uint64),
    positions=np.array([3, 0, 70_000], np.int32),
    temperature=np.array([3e3, 0.0, 1e4], np.float32),
    top_k=np.array([0, 0, 9], np.int32),
    top_p=np.array([0.99, 1.0, 1.0], np.float32),
    sharpness=np.array([0.8, 1.0, 1.1], np.float32),
)
"""Tiny random drafters are sure of themselves: at lower temperatures few tokens would be left."""
HIDDEN = 96


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def batch_of(rng: np.random.Generator, count: int = 3) -> DraftBatch:
    """Two pairs of each sequence for a drafter with a context, else one."""
    features, tokens = rng.standard_normal((2 * count, HIDDEN)), rng.integers(0, VOCAB, 2 * count)
    rows, slots = np.arange(0, 2 * count + 1, 2), np.arange(count)
    ints = lambda array: array.astype(np.int32)  # noqa: E731
    return DraftBatch(features.astype(np.float32), ints(tokens), ints(rows), ints(slots), np.zeros(count, np.int32))


def arrays(drafted: DraftCandidates) -> list[np.ndarray]:
    return [array.copy() for array in dataclasses.astuple(drafted) if array is not None]


def of(noise: SharedNoise, rows: list[int]) -> SharedNoise:
    return SharedNoise(*(array[rows] for array in vars(noise).values()))


def roots_of(batch: DraftBatch, reads_context: bool) -> DraftBatch:
    return batch if reads_context else DraftBatch.of_roots(batch.features[1::2].copy(), batch.tokens[1::2].copy())


def check_scores(plain: DraftCandidates, drafted: DraftCandidates, noise: SharedNoise) -> None:
    """The first level of `drafted` is what the operator makes of all that `plain` has."""
    inputs = NoiseBuffers(9).fill(noise, len(noise.seeds)).values()
    values, ids = (torch.from_numpy(array[:, 0, 0]) for array in (plain.log_probs, plain.candidates))
    scores, tokens = perturbed_topk(values, ids, *map(torch.from_numpy, inputs), level=0, k=5)
    found, there = drafted.log_probs[:, 0, 0], np.isfinite(scores.numpy())
    np.testing.assert_allclose(found, scores.numpy(), atol=2e-3, rtol=2e-3)
    np.testing.assert_array_equal(drafted.candidates[:, 0, 0][there], tokens.numpy()[there])


@torch.no_grad()
@pytest.mark.parametrize(
    ("backend", "kind"),
    [("openvino", kind) for kind in ("medusa", "hidden_state", "eagle")] + [("torch", "hidden_state")],
)
def test_candidates_are_chosen_by_the_noise(target, tmp_path, rng, backend, kind):
    """The first level by the operator; greedy sequences take the most likely, in any company; positions move it."""
    drafter = tiny_drafter_of(target, kind)
    wide, shared = (
        load_engine(tiny_bundle(tmp_path / name, target, backend, trained=drafter, beam_length=2, **plan)).drafters[
            METHOD
        ]
        for name, plan in (("wide", {"candidates": SUPPORT}), ("shared", {"support": SUPPORT}))
    )
    batch = roots_of(batch_of(rng), shared.reads_context)
    plain, drafted = wide.draft(batch), shared.draft(batch, NOISE)
    check_scores(plain, drafted, NOISE)
    first = arrays(drafted)
    greedy = arrays(shared.draft(batch))
    for name, mine, mixed in zip(("candidates", "log_probs"), greedy, first, strict=False):
        np.testing.assert_array_equal(mine[:, 0, 0], getattr(plain, name)[:, 0, 0, :5])
        np.testing.assert_array_equal(mixed[1], mine[1])
    moved = dataclasses.replace(NOISE, positions=NOISE.positions + np.int32(1))
    assert (shared.draft(batch, moved).candidates[2, 0] != first[0][2, 0]).any()


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loop_agrees_with_its_module(target, tmp_path, rng, backend):
    drafter = tiny_drafter_of(target, "recurrent")
    engine = load_engine(tiny_bundle(tmp_path, target, backend, trained=drafter, support=SUPPORT))
    batch = roots_of(batch_of(rng), False)
    drafted = engine.drafters[METHOD].draft(batch, NOISE)
    inputs = NoiseBuffers(9).fill(NOISE, 3).values()
    given = [batch.features, batch.tokens, *inputs]
    candidates, scores, parents = BeamSearch(drafter, 3, 3, 5, SUPPORT)([torch.from_numpy(x) for x in given])
    np.testing.assert_array_equal(drafted.parents, parents.numpy())
    np.testing.assert_allclose(drafted.log_probs, scores.numpy(), rtol=1e-3, atol=1e-3)
    there = np.isfinite(drafted.log_probs)
    np.testing.assert_array_equal(drafted.candidates[there], candidates.numpy()[there])


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_is_drafted_again_by_the_noise_of_its_new_positions(target, tmp_path, rng, backend):
    """What is left of a draft, below the root that it predicted, is drafted as before: two positions later."""
    drafter = tiny_drafter_of(target, "hidden_state, plain")
    plan = {"support": SUPPORT, "beam_width": 1, "beam_length": 4, "construction": "chain"}
    engine = load_engine(tiny_bundle(tmp_path, target, backend, trained=drafter, **plan)).drafters[METHOD]
    drafted = engine.draft(batch_of(rng), NOISE)
    ids, scores = drafted.candidates.copy(), drafted.log_probs.copy()
    roots = ids[:, 1, 0, 0].copy()
    later = dataclasses.replace(NOISE, positions=NOISE.positions + np.int32(2))
    again = engine.resample([chain[2:].copy() for chain in drafted.raw_logits], roots, later)
    np.testing.assert_array_equal(again.candidates[:, :2], ids[:, 2:])
    np.testing.assert_allclose(again.log_probs[:, 0], scores[:, 2] - scores[:, 1, 0, :1, None], atol=1e-4)
    same = engine.resample([chain[2:].copy() for chain in drafted.raw_logits], roots, NOISE)
    assert (same.candidates[:, 0] != ids[:, 2]).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_model_that_is_the_target_is_always_right(tmp_path, backend):
    """Through the scheduler, in float32, all tokens candidates, hot ones in another order than the target's."""
    target = tiny_target()
    for weight in target.parameters():
        weight.copy_(weight.bfloat16())  # as a drafter is stored
    order = torch.arange(VOCAB).flip(0)
    drafter = DraftLM.of_model(target, target, order)
    plan = {"support": VOCAB, "beam_width": 1, "beam_length": 6, "construction": "chain"}
    bundle = tiny_bundle(tmp_path, target, backend, trained=drafter, **plan)
    methods = {METHOD: MethodConfig(construction="chain", tree_budget=6)}
    outcome = generate(load_engine(bundle), methods)
    assert outcome.all_accepted
    assert min(outcome.drafted.values()) > 10


def test_noise_of_other_sequences_is_refused(target, tmp_path, rng):
    engine = load_engine(tiny_bundle(tmp_path, target, support=SUPPORT))
    batch = roots_of(batch_of(rng), False)
    with pytest.raises(ValueError, match=r"shape of seeds is \(2,\): expected \(3,\)"):
        engine.drafters[METHOD].draft(batch, of(NOISE, [0, 2]))


def test_native_form_refuses_the_noise(target):
    drafter = tiny_drafter_of(target, "recurrent")
    for export in (export_drafter_native, export_resampler_native):
        with pytest.raises(ValueError, match="support is 37, expected 0: networks in native form cannot make"):
            export(BeamSearch(drafter, 3, 4, 5, SUPPORT))
    with pytest.raises(ValueError, match="support is 4, expected at least the 5 candidates, or 0"):
        BeamSearch(drafter, 3, 4, 5, 4)
