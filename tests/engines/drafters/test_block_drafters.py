"""Drafters of a block in the engines: their drafts are those of their modules, which tests of the hub's forms compare
with the definitions, and the text is that of plain decoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compiler.methods import drafting_loop
from model_defs.drafters.block import BlockDrafter
from model_defs.drafters.token_info import InfoForm
from redraft.bundle.backends import BACKENDS
from redraft.bundle.budget import BudgetTable
from redraft.engines import load_engine
from redraft.method import MethodPlan
from tests.conftest import slow
from tests.engines.drafters.drafting import Drafting, arrays_of, check_draft, draft, following_chain
from tests.engines.scheduling import generate
from tests.engines.tiny import DRAFTING, LIMITS, METHOD, bundle_config, tiny_bundle, tiny_drafter_of


@pytest.mark.parametrize(
    ("variant", "backend"),
    [
        *(("block", "openvino"), ("parallel_eagle3", "openvino")),
        *(slow("block", "torch"), slow("parallel_eagle3", "torch")),
    ],
)
@torch.no_grad()
def test_drafts_and_text(target, tmp_path, variant, backend):
    """Prompts at once, then a few pairs at a time, in changing company, whose drafts have the same bits alone; then
    text of greedy and sampled requests, with and without drafting again from chains."""
    drafter = tiny_drafter_of(target, variant)
    engine = load_engine(tiny_bundle(tmp_path, target, backend, trained=drafter))
    rng = np.random.default_rng(3)
    sequences = [Drafting(slot) for slot in (4, 0, 8)]
    for company, counts in (([0], [9]), ([0, 1], [1, 21]), ([2, 0], [1, 3]), ([1, 0, 2], [4, 1, 5])):
        drafting = [sequences[place] for place in company]
        for s, count in zip(drafting, counts, strict=True):
            s.grow(rng, count)
        drafted = draft(engine, drafting)
        for b, s in enumerate(drafting):
            check_draft(drafter, drafted, b, s)
    if backend == "openvino":
        for b, s in enumerate(drafting):
            alone = Drafting(5, s.hidden, s.tokens)
            for array, whole in zip(arrays_of(draft(engine, [alone])), arrays_of(drafted), strict=True):
                np.testing.assert_array_equal(array[0], whole[b])
    chain, root = drafted.raw_logits[1, 2:], 98
    again = engine.drafters[METHOD].resample([chain], np.array([root], np.int32))
    expected = following_chain(drafter, InfoForm.low_rank, chain, root, [])
    np.testing.assert_allclose(again.log_probs[0, 0, 0], expected.topk(5).values, atol=2e-4)
    plain, _ = generate(engine, None)
    for lyanna in ({}, {"resample_above": 0, "resample_budget": 4}):
        plan = MethodPlan("best_first", budget=BudgetTable.constant(8), **lyanna)
        tokens, scheduler = generate(engine, plan)
        assert tokens == plain
        assert scheduler.totals.drafted > scheduler.totals.accepted > 0


def test_settings_that_do_not_fit_are_refused(target):
    config = bundle_config(target, {}, LIMITS)
    block = tiny_drafter_of(target, "block")
    assert isinstance(block, BlockDrafter)
    with pytest.raises(ValueError, match="--token-info int8: this drafter 'block' takes low_rank"):
        drafting_loop(block, DRAFTING, config, InfoForm.int8)
    with pytest.raises(ValueError, match="6 drafting steps: a block of this drafter's has 5"):
        drafting_loop(block, DRAFTING.model_copy(update={"beam_length": 6}), config)
    method, _ = drafting_loop(block, DRAFTING, config)
    assert (method.context.draft_rows, method.context.layers, method.chain_levels) == (12, 2, 3)
    limits = LIMITS.model_copy(update={"max_tree": 4})
    native = config.model_copy(update={"backend": BACKENDS["tensorrt_rtx"], "limits": limits})
    assert drafting_loop(block, DRAFTING, native)[0].context.draft_rows == 6
