"""The trees of RSD's appendix D.3 as methods of a bundle."""

from __future__ import annotations

import tomllib

import pytest

from benchmarks.rsd.shapes import (
    ALGORITHMS,
    BEST_FIRST,
    BUDGETS,
    EXPERIMENTS,
    LENGTHS,
    PUBLISHED,
    RSD_C,
    RSD_S,
    SD,
    SPECTR,
    Shape,
    methods_toml,
    shapes_of,
)
from redraft.decoding.random_trees import RANDOM_CONSTRUCTIONS
from redraft.decoding.verification import check_pairing

EVERY = shapes_of(list(EXPERIMENTS.values()))


@pytest.mark.parametrize("budget", BUDGETS.cells)
def test_every_tree_of_a_budget_has_as_many_nodes(budget):
    assert {shape.nodes for shape in BUDGETS.cells[budget]} == {budget}


@pytest.mark.parametrize("length", LENGTHS.cells)
def test_trees_of_a_length_are_no_larger_than_the_binary_one(length):
    shapes = LENGTHS.cells[length]
    assert {shape.length for shape in shapes} == {length}
    assert max(shape.nodes for shape in shapes) == 2 ** (length + 1) - 2
    beams = [shape.nodes for shape in shapes if shape.algorithm == RSD_S]
    assert [s.nodes for s in shapes if s.algorithm == RSD_C and s.levels[1] == 1] == beams
    assert [s.nodes for s in shapes if s.algorithm == BEST_FIRST] == beams


@pytest.mark.parametrize("experiment", EXPERIMENTS.values())
def test_every_cell_has_every_algorithm(experiment):
    for shapes in experiment.cells.values():
        counts = {name: sum(shape.algorithm == name for shape in shapes) for name in ALGORITHMS}
        assert counts == {SD: 1, SPECTR: 2, RSD_C: 3, RSD_S: 2, BEST_FIRST: 2}


@pytest.mark.parametrize("shape", [shape for shape in EVERY if shape.algorithm != BEST_FIRST])
def test_nodes_are_the_draws_of_the_construction(shape):
    settings = shape.settings(64)
    construction = RANDOM_CONSTRUCTIONS[settings["construction"]]
    assert sum(construction.shape(shape.levels).widths) == shape.nodes
    check_pairing(settings["construction"], settings["verification"], False)


def test_names():
    shapes = [Shape(SD, (1,) * 4), Shape(SPECTR, (3, 3)), Shape(RSD_C, (2, 2, 1)), Shape(BEST_FIRST, (12,) * 5)]
    assert [shape.spec for shape in shapes] == ["4", "3x2", "2-2-1", "12x5"]
    assert [shape.method for shape in shapes] == ["sd_4", "spectr_3x2", "rsd_c_2_2_1", "best_first_12x5"]
    assert len({shape.method for shape in EVERY}) == len(EVERY) == 79
    assert len(shapes_of([LENGTHS, BUDGETS], [4, 21])) == 20


def test_methods_file():
    methods = tomllib.loads(methods_toml(EVERY, 'a "folder"', 33))
    assert list(methods) == [shape.method for shape in EVERY]
    assert methods["rsd_c_2_2_1"] == {
        "drafter": 'a "folder"', "construction": "gumbel_top_k", "verification": "recursive_rejection",
        "levels": "2,2,1", "support": 33, "ngram": False,
    }  # fmt: skip
    assert methods["best_first_12x5"] == {
        "drafter": 'a "folder"', "construction": "best_first", "verification": "sampled_walk", "beam_width": 12,
        "beam_length": 5, "candidates": 12, "tree_budget": 60, "ngram": False,
    }  # fmt: skip
    assert methods["sd_30"]["levels"] == ",".join("1" * 30)
    plans = {(methods[shape.method]["construction"], methods[shape.method]["verification"]) for shape in EVERY}
    assert len(plans) == len(PUBLISHED) + 1
