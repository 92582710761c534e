"""The drawing loop over a real drafter, in torch, against the reference loop driven by the drafter's own logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from redraft.batch import DraftDraws
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.model_defs.loops.random_draws import RandomDraws
from redraft.plugins.operators.draw_step import RULES
from tests.engines.draws import LEVELS, SUPPORT, assert_same_draws, draft_batch, expected_draws, sampling_of
from tests.engines.tiny import tiny_drafter, tiny_target


def loop(construction: str, support: int = SUPPORT) -> RandomDraws:
    return RandomDraws(
        tiny_drafter(tiny_target()), RANDOM_CONSTRUCTIONS[construction].rule, LEVELS[construction], support
    )


@pytest.mark.parametrize("construction", LEVELS)
def test_draws_are_those_of_the_reference_loop(construction):
    module, batch, sampling = loop(construction), draft_batch(7), sampling_of(construction, 7)
    drawn = module([torch.from_numpy(x) for x in (batch.features, batch.tokens, *vars(sampling).values())])
    expected = expected_draws(module.drafter, construction, batch, sampling)
    assert_same_draws(DraftDraws(*(x.numpy() for x in drawn)), expected)


@pytest.mark.parametrize("construction", LEVELS)
def test_noise_rows_are_the_shapes(construction):
    shape = RANDOM_CONSTRUCTIONS[construction].shape(LEVELS[construction])
    assert loop(construction).noise_rows == sum(shape.noise_rows)


def test_every_construction_has_a_rule_of_the_operator():
    assert {construction.rule for construction in RANDOM_CONSTRUCTIONS.values()} <= set(RULES)


def test_more_support_than_the_drafter_knows_is_refused():
    with pytest.raises(ValueError, match="support is 51, expected at most the 50 tokens that the drafter knows"):
        loop("gumbel_top_k", support=51)


def test_the_reference_sees_what_noise_does():
    """A bug in either loop cannot hide behind draws that are always the likeliest."""
    batch, sampling = draft_batch(7), sampling_of("random_chain", 7)
    drafter = tiny_drafter(tiny_target())
    first = [expected_draws(drafter, "random_chain", batch, sampling_of("random_chain", 7, seed)) for seed in range(5)]
    assert len({tuple(draws.draws[0].tolist()) for draws in first}) > 1
    assert np.isneginf(first[0].log_probs[1]).any(), "some tokens are filtered out"
    assert sampling.temperature[0] == 1.0
