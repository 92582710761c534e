"""Methods fitted to their drafters: only what was not given changes."""

from __future__ import annotations

from typing import Any

import pytest

from compiler.methods import MethodSettings
from redraft.errors import BundleError
from tests.engines.tiny import DRAFTING

SEARCH = DRAFTING.model_copy(update={"beam_length": 5})
DRAWS = DRAFTING.model_copy(update={"construction": "gumbel_top_k", "levels": (4, 2, 1), "tree_budget": 20})


def settings(**given: Any) -> MethodSettings:
    return MethodSettings.model_validate({"drafter": "d", **given})


@pytest.mark.parametrize(("most", "length"), [(None, 5), (6, 5), (5, 5), (3, 3)])
def test_beams_are_no_longer_than_the_drafter_goes(most, length):
    assert settings().fitted(SEARCH, most) == SEARCH.model_copy(update={"beam_length": length})
    assert settings(beam_length=5).fitted(SEARCH, most) == SEARCH


def test_draws_are_no_deeper_and_their_usual_budget_is_smaller():
    draws = settings(construction="gumbel_top_k")
    assert draws.fitted(DRAWS, 3) == DRAWS
    assert draws.fitted(DRAWS, 2) == DRAWS.model_copy(update={"levels": (4, 2), "tree_budget": 12})
    budget = settings(construction="gumbel_top_k", tree_budget=7)
    assert budget.fitted(DRAWS, 2) == DRAWS.model_copy(update={"levels": (4, 2), "tree_budget": 7})
    given = settings(construction="gumbel_top_k", levels="4,2,1")
    assert given.fitted(DRAWS, 2) == DRAWS


def test_thresholds_that_never_matter_in_shorter_drafts_are_refused():
    method = SEARCH.model_copy(update={"resample_above": 2})
    assert settings(resample_above=2).fitted(method, 4).beam_length == 4
    with pytest.raises(BundleError, match=r"--resample-above 2: expected less than 2, .* of 3 tokens, as deep as this"):
        settings(resample_above=2).fitted(method, 3)
