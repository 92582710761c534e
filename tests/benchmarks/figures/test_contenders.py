"""Cells of tables."""

from benchmarks.figures.contenders import more_than_first


def test_the_paired_difference_is_what_a_contender_has_more():
    assert more_than_first({"acceptance_below_first_interval": [-0.5, 0.0]}) == "+0.00 to +0.50"
    assert more_than_first({"acceptance_below_first_interval": [0.1, 0.2024]}, 3) == "-0.202 to -0.100"
    assert more_than_first({"acceptance_below_first_interval": [0.0, 0.0]}) == "", "the first itself"
