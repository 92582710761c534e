"""The worked example of docs/how-it-works.md: a recorded step, its pictures and redraft.decoding agree."""

from benchmarks.figures.step_pictures import FOLDER, PICTURES, Example

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


def test_each_token_is_where_the_random_number_of_its_position_falls():
    for given, depth in zip(EXAMPLE.recorded["target"], EXAMPLE.depths, strict=True):
        low, high = given["intervals"][str(given["token"])]
        assert low <= EXAMPLE.uniform(depth) < high


def test_the_pictures_are_those_of_the_recorded_step():
    for name, draw in PICTURES.items():
        assert (FOLDER / f"{name}.svg").read_text() == draw(EXAMPLE).svg(), f"{name}: draw it anew, see the module"
