"""The worked example of docs/how-it-works.md: a recorded step, its pictures and redraft.decoding agree."""

import numpy as np

from redraft.decoding.noise import race
from studies.figures.step_pictures import FOLDER, PICTURES, Example

EXAMPLE = Example.load()
STEP, NEXT = EXAMPLE.recorded["step"], EXAMPLE.recorded["next_step"]


def test_the_tree_of_the_beams_is_what_the_engine_was_given():
    assert [token for token, _, _ in EXAMPLE.tree.nodes[0]] == STEP["input_ids"]
    assert [[mask] for mask in EXAMPLE.masks] == STEP["tree_mask"]
    assert [EXAMPLE.context + depth for depth in EXAMPLE.depths] == STEP["positions"]


def test_the_walk_is_what_the_next_step_commits():
    verdict = EXAMPLE.verdict
    assert verdict.path == NEXT["commit_src"]
    assert verdict.tokens[-1] == NEXT["input_ids"][0]
    assert EXAMPLE.context + len(verdict.path) == NEXT["cache_lengths"][0]


def test_each_token_has_the_largest_sum_of_log_probability_and_noise():
    """The noise is that of the picture's seed and output position."""
    seed, position = EXAMPLE.recorded["seed"], EXAMPLE.recorded["position"]
    for given, depth in zip(EXAMPLE.recorded["target"], EXAMPLE.depths, strict=True):
        sums = {int(token): log + noise for token, (log, noise) in given["scores"].items()}
        assert max(sums, key=sums.__getitem__) == given["token"]
        expected = -np.log(race(seed, position + depth, np.array(list(sums))))
        np.testing.assert_allclose([noise for _, noise in given["scores"].values()], expected, atol=1e-4)


def test_the_pictures_are_those_of_the_recorded_step():
    for name, draw in PICTURES.items():
        assert (FOLDER / f"{name}.svg").read_text() == draw(EXAMPLE).svg(), f"{name}: draw it anew, see the module"
