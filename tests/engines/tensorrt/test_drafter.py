"""Drafters of TensorRT over a stand-in library whose engines compute: drafts, draws and drafting again from chains.

The slow cases would catch a kind of drafter whose native-form network, profiles or context cache give other drafts than
its module.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from redraft.batch import DraftCandidates
from redraft.bundle.method import MethodConfig
from redraft.engines import load_engine
from redraft.model_defs.drafters.token_info import InfoForm
from tests.conftest import slow_but
from tests.engines import tiny
from tests.engines.drafters.drafting import Drafting, check, draft, following
from tests.engines.draws import LEVELS, SUPPORT, draft_batch, sampling_of
from tests.engines.scheduling import generate
from tests.engines.tensorrt.bundles import LIMITS, bundle_of
from tests.engines.tiny import (
    METHOD,
    VOCAB,
    tiny_bundle,
    tiny_drafter_of,
    tiny_target,
)


@pytest.mark.parametrize(
    "variant",
    slow_but(["eagle"], ["eagle", "eagle3", "medusa"]),
)
@torch.no_grad()
def test_drafts_are_those_of_the_module(variant, monkeypatch, tmp_path):
    """Prompts longer than a chunk, then a few pairs at a time, in changing company."""
    target = tiny_target()
    drafter = tiny_drafter_of(target, variant)
    options: dict = {"beam_length": 2} if variant == "eagle3" else {}  # deeper ones are as eagle's
    engine = load_engine(bundle_of("tensorrt_rtx", monkeypatch, tmp_path, trained=drafter, **options))
    rng, sequences = np.random.default_rng(3), [Drafting(slot) for slot in (4, 0, 2)]
    steps = [([0], [40]), ([0, 1], [1, 9]), ([2, 0], [8, 3]), ([1, 0, 2], [4, 1, 5]), ([2], [1])]
    for company, counts in steps:
        drafting = [sequences[place] for place in company]
        for s, count in zip(drafting, counts, strict=True):
            s.grow(rng, count)
        if not drafter.reads_context:
            for s in drafting:
                s.ingested = len(s.tokens) - 1
        drafted = draft(engine, drafting)
        for b, s in enumerate(drafting):
            check(drafter, drafted, b, partial(following, drafter, s.hidden, s.tokens, form=InfoForm.bf16))
            assert drafted.log_probs.dtype == np.float32
    assert drafted.raw_logits is None
    with pytest.raises(RuntimeError, match="this drafter leaves no chain to draft again from"):
        engine.drafters[METHOD].resample([np.zeros((1, 50), np.float32)], np.zeros(1, np.int32))


@pytest.mark.slow
def test_draws_are_the_torch_backends(monkeypatch, tmp_path):
    plan = {"construction": "stochastic_beam", "levels": LEVELS["stochastic_beam"], "support": SUPPORT}
    drafter = tiny_drafter_of(tiny_target(), "eagle")
    options = {"trained": drafter, "limits": LIMITS, **plan}
    ours = load_engine(bundle_of("tensorrt_rtx", monkeypatch, tmp_path / "rtx", **options))
    torchs = load_engine(tiny_bundle(tmp_path / "torch", tiny_target(), "torch", **options))
    batch = draft_batch(3)
    batch.slots = np.array([3, 0, 4], np.int32)
    found = []
    for engine in (ours, torchs):
        found.append(engine.drafters[METHOD].draw(batch, sampling_of("stochastic_beam", 3)))
    for field, kept in vars(found[0]).items():
        np.testing.assert_allclose(kept, getattr(found[1], field), atol=1e-4, rtol=1e-4, err_msg=field)


@pytest.fixture(scope="module")
def resampling(tmp_path_factory) -> list:
    """Engines of TensorRT for RTX and of torch whose drafters draft again from chains."""
    options = {"trained": tiny_drafter_of(tiny_target(), "hidden_state"), "resample_above": 0}
    options |= {"token_info": InfoForm.bf16, "limits": tiny.LIMITS, "beam_length": 4}
    folder = tmp_path_factory.mktemp("resampling")
    with pytest.MonkeyPatch.context() as monkeypatch:
        ours = load_engine(bundle_of("tensorrt_rtx", monkeypatch, folder / "rtx", **options))
    return [ours, load_engine(tiny_bundle(folder / "torch", tiny_target(), "torch", **options))]


@pytest.mark.slow
def test_drafting_again_gives_the_torch_backends_candidates(resampling):
    """From chains of several lengths, below other roots, in companies that fill a bucket or do not."""
    ours, torchs = (engine.drafters[METHOD] for engine in resampling)
    batch, rng = draft_batch(3), np.random.default_rng(5)
    batch.slots = np.array([3, 0, 1], np.int32)

    def compared(found: DraftCandidates, expected: DraftCandidates) -> DraftCandidates:
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4, rtol=1e-4)
        there = np.isfinite(expected.log_probs)
        np.testing.assert_array_equal(found.candidates[there], expected.candidates[there])
        np.testing.assert_array_equal(found.parents[there.any(-1)], expected.parents[there.any(-1)])
        return found

    drafted, expected = ours.draft(batch), torchs.draft(batch)
    chains = compared(drafted, expected).raw_logits.copy()
    assert chains.shape == (3, 4, 50)
    np.testing.assert_allclose(chains, expected.raw_logits, atol=1e-4, rtol=1e-4)
    for company, starts in (((0, 1, 2), (1, 3, 2)), ((2,), (1,)), ((1, 0), (2, 1)), ((0, 1, 2, 0, 1), (2, 1, 1, 3, 2))):
        left = [chains[b, start:] for b, start in zip(company, starts, strict=True)]
        roots = rng.integers(0, VOCAB, len(company)).astype(np.int32)
        again = compared(ours.resample(left, roots), torchs.resample(left, roots))
        assert again.candidates.shape == (len(company), 3, 3, 5)
    with pytest.raises(ValueError, match="1 chains of up to 4 levels, 1 roots: expected one of each for 1 to 9"):
        ours.resample([chains[0]], roots[:1])


@pytest.mark.slow
def test_drafting_again_from_chains_changes_no_text(resampling):
    """And accepts what the torch backend does."""
    plan = MethodConfig(construction="best_first", tree_budget=5, resample_above=0, skip_above=1)
    (tokens, found), (_, expected) = (generate(engine, plan) for engine in resampling)
    assert tokens == generate(resampling[0], None)[0]
    for counted in ("steps", "drafted", "accepted", "reused", "rows_executed"):
        assert getattr(found.totals, counted) == getattr(expected.totals, counted), counted
