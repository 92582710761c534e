"""What a build makes of the target it is given."""

from __future__ import annotations

import dataclasses

import pytest

from compiler.bundle import attach_features, target_info, unknown_tokens
from redraft.engines.memory import cache_bytes
from tests.engines.tiny import VOCAB, tiny_bundle, tiny_drafter_of, tiny_target, write_tokenizer


def test_a_target_gives_hidden_states_again_after_a_build_of_deeper_features():
    target = tiny_target()
    deep = tiny_drafter_of(target, "eagle3")
    attach_features(target, [deep], features=True)
    assert target.feature_size == 2 * target.config.hidden_size
    attach_features(target, [], features=True)
    assert target.feature_size == target.config.hidden_size


@pytest.mark.parametrize("short", [0, 1])
def test_caches_that_would_not_fit_this_machine_are_foreseen(short, tmp_path, monkeypatch, capsys):
    target = tiny_target()
    eagle = tiny_drafter_of(target, "eagle")
    needed = cache_bytes(tiny_bundle(tmp_path / "first", target, trained=eagle).config)
    monkeypatch.setattr("compiler.bundle.most_bytes", lambda: needed - short)
    capsys.readouterr()
    tiny_bundle(tmp_path / "second", target, trained=eagle)
    assert ("smaller --max-len" in capsys.readouterr().err) == bool(short)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [(range(VOCAB), ()), (range(VOCAB - 9), ((VOCAB - 9, VOCAB),)), ([0, 1, 5, 6], ((2, 3), (4, 5), (7, VOCAB)))],
    ids=["none", "padding", "holes too"],
)
def test_ids_that_the_tokenizer_does_not_know(ids, expected, tmp_path):
    target = tiny_target()
    target.config = dataclasses.replace(target.config, eos_token_ids=(3,))
    write_tokenizer(tmp_path, {f"t{token}": token for token in ids})
    assert unknown_tokens(tmp_path, target) == expected
    assert target_info(target, expected).unknown_tokens == expected
