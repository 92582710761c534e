"""What a build makes of the target it is given."""

from __future__ import annotations

from compiler.bundle import attach_features
from tests.engines.tiny import tiny_drafter_of, tiny_target


def test_a_target_gives_hidden_states_again_after_a_build_of_deeper_features():
    target = tiny_target()
    deep = tiny_drafter_of(target, "eagle3")
    attach_features(target, [deep], features=True)
    assert target.feature_size == 2 * target.config.hidden_size
    attach_features(target, [], features=True)
    assert target.feature_size == target.config.hidden_size
