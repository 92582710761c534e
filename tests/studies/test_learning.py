"""The domains' prompts, and what the study of learning makes of answers."""

from __future__ import annotations

import pytest

from redraft.request import SequenceStats
from studies.learning.domains import DOMAINS
from studies.learning.measured import compared
from studies.learning.served import HELD_OUT, TAUGHT


@pytest.mark.parametrize("name", DOMAINS)
def test_a_domain_has_many_prompts_and_the_held_out_ones_are_others(name):
    taught, held_out = (DOMAINS[name].prompts(300, seed) for seed in (TAUGHT, HELD_OUT))
    assert taught == DOMAINS[name].prompts(300, TAUGHT)
    turns = [[prompt[1]["content"] for prompt in prompts] for prompts in (taught, held_out)]
    assert len(set(turns[0])) == len(set(turns[1])) == 300
    assert not set(turns[0]) & set(turns[1])


def test_two_runs_are_compared_by_tokens_per_step():
    before = [SequenceStats(steps=10, accepted=accepted) for accepted in (5, 10, 15)]
    after = [SequenceStats(steps=8, accepted=accepted) for accepted in (8, 12, 16)]
    figures = compared(before, after)
    assert (figures["tokens_per_step_before"], figures["tokens_per_step_after"]) == (2.0, 2.5)
    assert figures["ratio_low"] <= figures["ratio"] == 1.25 <= figures["ratio_high"]
