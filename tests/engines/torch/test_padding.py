"""Padded batches, and a GPU's kernels and graphs, give what plain ones on the CPU do.

The slow cases would catch a kind of drafter or construction whose padded rows change its drafts.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from redraft.batch import DraftBatch, DraftCandidates
from redraft.engines import load_engine
from redraft.engines.cuda.buckets import Bucket
from redraft.engines.features import on_host
from tests.conftest import slow
from tests.engines.drafters.drafting import Drafting, arrays_of, draft
from tests.engines.draws import LEVELS, SUPPORT, assert_same_draws, draft_batch, sampling_of
from tests.engines.tiny import METHOD, make_batch, random_tree, tiny_bundle, tiny_drafter_of, tiny_lm


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_agrees_with_the_cpu(precision, tmp_path, monkeypatch):
    """Kernels and CUDA graphs, in steps of changing company; head size 64."""
    target = tiny_lm()
    bundle = tiny_bundle(tmp_path, target, "torch", precision, trained=tiny_drafter_of(target, "eagle"))
    found = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr("redraft.engines.torch.available_device", lambda device=device: torch.device(device))
        engine, rng, given = load_engine(bundle), np.random.default_rng(2), []
        sequences = [Drafting(slot, torch.zeros(0, 56)) for slot in (8, 0, 3)]
        for company in ([0], [1, 0, 2], [2, 0]):
            trees = [random_tree(rng, sequences[place].slot, [], 3 + place) for place in company]
            given += copied(engine.execute(make_batch(trees)))
            for place in company:
                sequences[place].grow(rng, 4)
            given.append(draft_for(engine, [sequences[place] for place in company]).log_probs[:, 0, 0])
        found.append(given)
    for cpu, gpu in zip(*found, strict=True):
        np.testing.assert_allclose(gpu, cpu, atol=1e-3 if precision == "fp32" else 0.1 * np.abs(cpu).max())


def copied(given) -> list[np.ndarray]:
    """Logits and hidden states, which the next call overwrites."""
    return [on_host(rows).copy() for rows in given]


def unpadded(monkeypatch) -> None:
    monkeypatch.setattr("redraft.engines.torch.fitting", lambda _, *sizes: Bucket(*sizes))


def test_padding_changes_nothing(bundle_of_kind, monkeypatch):
    """Padded rows, pairs and sequences: the same logits, hidden states, drafts and caches, in changing company."""
    found = []
    for padded in (True, False):
        if not padded:
            unpadded(monkeypatch)
        engine, rng, given = load_engine(bundle_of_kind), np.random.default_rng(2), []
        sequences = [Drafting(slot) for slot in (8, 0, 3, 5, 1)]
        for company, counts in (([0], [5]), ([1, 0, 2, 3, 4], [1, 2, 9, 1, 4]), ([2, 4, 3], [1, 20, 1])):
            steps = [random_tree(rng, sequences[place].slot, [], 1 + 7 * place) for place in company]
            given += copied(engine.execute(make_batch(steps)))
            for place, count in zip(company, counts, strict=True):
                sequences[place].grow(rng, count)
            given += arrays_of(draft_for(engine, [sequences[place] for place in company]))
        given += [cache[..., :80, :].float().numpy() for cache in engine.caches[0] + engine.caches[1]]
        given += [cache[:9].float().numpy() for cache in engine.drafters[METHOD].caches]
        found.append(given)
    for padded, plain in zip(*found, strict=True):
        assert padded.shape == plain.shape
        np.testing.assert_allclose(padded, plain, rtol=5e-5, atol=1e-4)


def draft_for(engine, sequences: list[Drafting]) -> DraftCandidates:
    """A draft, for any kind of drafter."""
    if engine.drafters[METHOD].reads_context:
        return draft(engine, sequences)
    hidden = np.stack([s.hidden[-1].numpy() for s in sequences])
    roots = np.array([s.tokens[-1] for s in sequences], np.int32)
    return engine.drafters[METHOD].draft(DraftBatch.of_roots(hidden, roots))


@pytest.mark.parametrize("construction", ["stochastic_beam", slow("independent")])
def test_padding_changes_no_draws(construction, target, tmp_path, monkeypatch):
    plan = {"levels": LEVELS[construction], "support": SUPPORT, "construction": construction, "ngram": False}
    bundle, drawn = tiny_bundle(tmp_path, target, "torch", **plan), []
    batch, sampling = draft_batch(5), sampling_of(construction, 5)
    for padded in (True, False):
        if not padded:
            unpadded(monkeypatch)
        drawn.append(load_engine(bundle).drafters[METHOD].draw(batch, sampling))
    assert_same_draws(*drawn)
