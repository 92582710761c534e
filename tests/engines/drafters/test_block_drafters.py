"""Drafters of a block in the engines: their drafts are those of their modules, which tests of the hub's forms compare
with the definitions, and the text is that of plain decoding."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from redraft.bundle.backends import BACKENDS
from redraft.bundle.method import MethodConfig
from redraft.compiler.methods import drafting_loop
from redraft.engines import load_engine
from redraft.model_defs.drafters.block import BlockDrafter
from redraft.model_defs.drafters.token_info import InfoForm
from tests.conftest import slow
from tests.engines.drafters.drafting import Drafting, arrays_of, check_drafts, draft, following_chain
from tests.engines.scheduling import generate
from tests.engines.tiny import DRAFTING, LIMITS, METHOD, bundle_config, tiny_bundle, tiny_drafter_of

PLANS: list[tuple[str, dict]] = [
    ("best_first", {}),
    ("best_first", {"resample_above": 0, "resample_budget": 4}),
    ("beam", {"ngram": True}),
    ("chain", {}),
]
"""Every construction that searches."""


@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        *(("block", "openvino"), ("parallel_eagle3", "openvino")),
        *(slow("block, causal", "torch"), slow("parallel_eagle3", "torch")),
    ],
)
@torch.no_grad()
def test_drafts_and_text(target, tmp_path, variant, backend):
    """Prompts at once, then a few pairs at a time, in changing company, whose drafts have the same bits alone; then
    text of greedy and sampled requests, of every construction, with and without drafting again from chains."""
    drafter = tiny_drafter_of(target, variant)
    engine = load_engine(tiny_bundle(tmp_path, target, backend, trained=drafter))
    rng = np.random.default_rng(3)
    sequences = [Drafting(slot) for slot in (4, 0, 8)]
    steps = [([0], [9]), ([0, 1], [1, 21]), ([2, 0], [1, 3]), ([1, 0, 2], [4, 1, 5])]
    drafting, drafted = check_drafts(drafter, engine, sequences, rng, steps)
    if backend == "openvino":
        for b, s in enumerate(drafting):
            alone = Drafting(5, s.hidden, s.tokens)
            for array, whole in zip(arrays_of(draft(engine, [alone])), arrays_of(drafted), strict=True):
                np.testing.assert_array_equal(array[0], whole[b])
    chain, root = drafted.raw_logits[1, 2:], 98
    again = engine.drafters[METHOD].resample([chain], np.array([root], np.int32))
    expected = following_chain(drafter, InfoForm.low_rank, chain, root, [])
    np.testing.assert_allclose(again.log_probs[0, 0, 0], expected.topk(5).values, atol=2e-4)
    (plain, _), accepted = generate(engine, None), 0
    for construction, more in PLANS if backend == "openvino" else PLANS[:2]:
        tokens, scheduler = generate(engine, MethodConfig(construction=construction, tree_budget=12, **more))
        assert tokens == plain, construction
        assert scheduler.totals.drafted > scheduler.totals.accepted
        accepted += scheduler.totals.accepted
    assert accepted > 0


def test_settings_that_do_not_fit_are_refused(target):
    config = bundle_config(target, {}, LIMITS)
    block = tiny_drafter_of(target, "block")
    assert isinstance(block, BlockDrafter)
    with pytest.raises(ValueError, match="--token-info int8: this drafter 'block' takes low_rank"):
        drafting_loop(block, DRAFTING, config, InfoForm.int8)
    with pytest.raises(ValueError, match="--beam-length 6: expected at most 5, as many steps as this drafter 'block'"):
        drafting_loop(block, DRAFTING.model_copy(update={"beam_length": 6}), config)
    windowed = copy.deepcopy(block)
    windowed.config = dataclasses.replace(block.config, window=70)
    with pytest.raises(ValueError, match="--max-len 80: the drafter 'block' reads contexts of 70 positions"):
        drafting_loop(windowed, DRAFTING, config)
    method, _ = drafting_loop(block, DRAFTING, config)
    assert (method.context.draft_rows, method.context.layers, method.chain_levels) == (12, 2, 2)
    limits = LIMITS.model_copy(update={"max_tree": 4})
    native = config.model_copy(update={"backend": BACKENDS["tensorrt_rtx"], "limits": limits})
    assert drafting_loop(block, DRAFTING, native)[0].context.draft_rows == 7
