"""Acceptance by depth, counted over the steps of several answers."""

from benchmarks.speed.acceptance import conditional_acceptance, depth_counts
from redraft.request import SequenceStats


def test_depths_are_counted_over_all_steps():
    first = SequenceStats(steps=8, offered_by_depth=[8, 4, 3], accepted_by_depth=[4, 3, 0])
    second = SequenceStats(steps=2, offered_by_depth=[2], accepted_by_depth=[1])
    assert depth_counts([first, second, SequenceStats()]) == [(5, 10), (3, 4), (0, 3)]
    assert depth_counts([SequenceStats()]) == []


def test_conditional_acceptance_is_accepted_over_accepted_at_the_depth_before():
    """Whether or not the tree had the depth: of 5 accepted at depth 1, 3 were followed by another."""
    assert conditional_acceptance(10, [5, 3, 0]) == [(5, 10), (3, 5), (0, 3)]
    assert conditional_acceptance(10, []) == []
