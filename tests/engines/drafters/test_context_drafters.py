"""Drafters with a context cache in the engines, against their modules run from scratch.

The slow cases would catch a kind of drafter, a backend or a form of token info whose drafts are not its module's.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from redraft.bundle.backends import BACKENDS
from redraft.engines import load_engine
from redraft.model_defs.drafters.token_info import InfoForm
from redraft.model_defs.target.model import Target
from tests.conftest import slow
from tests.engines.drafters.drafting import (
    Drafting,
    arrays_of,
    check,
    check_draft,
    check_drafts,
    draft,
    following,
    following_chain,
)
from tests.engines.tiny import METHOD, tiny_bundle, tiny_drafter_of

QUICK = ("hidden_state", "eagle", "draft_lm")


@pytest.mark.parametrize(
    ("backend", "variant"),
    [
        *(("openvino", variant) for variant in QUICK),
        *(slow("openvino", variant) for variant in ("eagle3", "draft_lm, model")),
        *(slow("torch", variant) for variant in ("hidden_state, plain", "eagle3")),
    ],
)
@torch.no_grad()
def test_drafts_are_those_of_the_module_run_from_scratch(target: Target, tmp_path, backend, variant):
    """Prompts at once, then a few pairs at a time, in changing company; some sequences skip drafts."""
    drafter = tiny_drafter_of(target, variant)
    engine = load_engine(tiny_bundle(tmp_path, target, backend, trained=drafter))
    assert engine.drafters[METHOD].reads_context
    rng = np.random.default_rng(3)
    sequences = [Drafting(slot) for slot in (4, 0, 8)]
    steps = [
        ([0], [9]),
        ([0, 1], [1, 21]),
        ([2, 0], [3, 3]),
        ([1, 0, 2], [4, 1, 6]),
        ([2], [3]),
        ([0, 2, 1], [5, 2, 2]),
    ]
    check_drafts(drafter, engine, sequences, rng, steps)
    replaced = Drafting(4)
    replaced.grow(rng, 6)
    check_draft(drafter, draft(engine, [replaced]), 0, replaced)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["openvino", slow("torch")])
def test_a_drafter_without_context(target: Target, tmp_path, backend):
    drafter = tiny_drafter_of(target, "medusa")
    engine = load_engine(tiny_bundle(tmp_path, target, backend, trained=drafter))
    assert not engine.drafters[METHOD].reads_context
    rng = np.random.default_rng(3)
    for batch in (3, 1):
        sequences = [Drafting(slot) for slot in range(batch)]
        for s in sequences:
            s.grow(rng, 1)
        drafted = draft(engine, sequences)
        for b, s in enumerate(sequences):
            check_draft(drafter, drafted, b, s)


@pytest.mark.parametrize(
    ("variant", "precision"),
    [("hidden_state", "bf16"), ("eagle", "fp32"), ("eagle", "int4"), ("draft_lm", "fp32"), slow("eagle3", "fp32")],
)
def test_a_draft_has_the_bits_of_the_one_alone(target, tmp_path, variant, precision):
    """Whatever was ingested with it, and however its pairs were divided into calls."""
    engine = load_engine(tiny_bundle(tmp_path, target, precision=precision, trained=tiny_drafter_of(target, variant)))
    rng = np.random.default_rng(5)
    sequences = [Drafting(slot) for slot in (1, 6, 3)]
    for s, count in zip(sequences, (30, 1, 7), strict=True):
        s.grow(rng, count)
    together = draft(engine, sequences)
    for b, s in enumerate(sequences):
        alone = Drafting(5)
        for end in sorted({1, len(s.tokens) // 2, len(s.tokens)} - {0}):
            alone.hidden, alone.tokens = s.hidden[:end], s.tokens[:end]
            last = draft(engine, [alone])
        for array, whole in zip(arrays_of(last), arrays_of(together), strict=True):
            np.testing.assert_array_equal(array[0], whole[b])


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("backend", "form"),
    [("openvino", InfoForm.bf16), ("openvino", InfoForm.low_rank), ("torch", BACKENDS["torch"].token_info[-1])],
)
def test_other_forms_of_token_info(target: Target, tmp_path, form, backend):
    drafter = tiny_drafter_of(target, "hidden_state")
    engine = load_engine(tiny_bundle(tmp_path, target, backend, trained=drafter, token_info=form))
    rng = np.random.default_rng(3)
    sequences = [Drafting(slot) for slot in (4, 0, 8)]
    for s, count in zip(sequences, (9, 1, 4), strict=True):
        s.grow(rng, count)
    drafted = draft(engine, sequences)
    for b, s in enumerate(sequences):
        check(drafter, drafted, b, lambda path, s=s: following(drafter, s.hidden, s.tokens, path, form))


@torch.no_grad()
@pytest.mark.parametrize(("backend", "form"), [("openvino", InfoForm.int8), slow("torch", InfoForm.low_rank)])
def test_drafting_again_from_a_chain(target, tmp_path, backend, form):
    """From chains of several lengths, below other roots, and in other company."""
    drafter = tiny_drafter_of(target, "hidden_state")
    engine = load_engine(tiny_bundle(tmp_path, target, backend, trained=drafter, token_info=form, beam_length=4))
    rng = np.random.default_rng(5)
    sequences = [Drafting(slot) for slot in (1, 6, 3)]
    for s in sequences:
        s.grow(rng, 5)
    raw = draft(engine, sequences).raw_logits
    assert raw.shape == (3, 4, 50)
    roots = np.array([4, 110, 98], np.int32)
    for company, starts in (((0, 1, 2), (1, 3, 2)), ((2,), (1,)), ((1, 0), (2, 1))):
        chains = [raw[b, start:] for b, start in zip(company, starts, strict=True)]
        drafted = engine.drafters[METHOD].resample(chains, roots[list(company)])
        assert drafted.candidates.shape == (len(company), 3, 3, 5)
        for place, (b, chain) in enumerate(zip(company, chains, strict=True)):
            assert np.isfinite(drafted.log_probs[place, : len(chain), 0]).all()
            assert np.isinf(drafted.log_probs[place, len(chain) :]).all()
            check(drafter, drafted, place, partial(following_chain, drafter, form, chain, int(roots[b])))
    with pytest.raises(ValueError, match="1 chains of up to 4 levels, 1 roots: expected one of each for 1 to 9"):
        engine.drafters[METHOD].resample([raw[0]], roots[:1])


def test_batches_that_do_not_fit_are_refused(target, tmp_path):
    engine = load_engine(tiny_bundle(tmp_path, target, trained=tiny_drafter_of(target, "hidden_state")))
    rng = np.random.default_rng(5)
    first, second = Drafting(1), Drafting(1)
    first.grow(rng, 2)
    second.grow(rng, 1)
    with pytest.raises(ValueError, match=r"slots are \[1, 1\]: expected one of its own for every sequence"):
        draft(engine, [first, second])
    with pytest.raises(RuntimeError, match="sequence 1 has 0 pairs: expected at least 1"):
        draft(engine, [Drafting(1, first.hidden, first.tokens), Drafting(2)])
    long = Drafting(1)
    long.grow(rng, 87)
    with pytest.raises(RuntimeError, match="cache length and rows 87: expected at most the cache's rows"):
        draft(engine, [long])
