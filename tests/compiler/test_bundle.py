"""What a build makes of the target it is given."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from redraft.bundle.config import LimitsInfo
from redraft.compiler.bundle import (
    attach_features,
    check_successors,
    stored_bytes,
    target_info,
    unknown_tokens,
    with_usual_context,
)
from redraft.engines.memory import cache_bytes
from redraft.errors import BundleError
from redraft.model_defs.target.model import Target
from tests.engines.tiny import VOCAB, bundle_config, tiny_bundle, tiny_drafter_of, tiny_of, tiny_target, write_tokenizer
from tests.model_defs.weights.folders import MIXED, write_folder


def test_a_target_gives_hidden_states_again_after_a_build_of_deeper_features():
    target = tiny_target()
    deep = tiny_drafter_of(target, "eagle3")
    attach_features(target, [deep], features=True)
    assert target.feature_size == 2 * target.config.hidden_size
    attach_features(target, [], features=True)
    assert target.feature_size == target.config.hidden_size


def test_bigrams_that_are_none_are_named(tmp_path):
    path = tmp_path / "bigrams.npy"
    for harm in (path.mkdir, path.rmdir, path.touch, lambda: path.write_bytes(b"junk")):
        harm()
        with pytest.raises(BundleError, match=rf"^{path} is not a .npy file of bigrams, or damaged$"):
            check_successors(path, 3)
    np.save(path, np.zeros(2))
    with pytest.raises(BundleError, match=r"has shape \(2,\), expected a successor of each of 3"):
        check_successors(path, 3)
    np.save(path, np.zeros(3))
    check_successors(path, 3)


@pytest.mark.parametrize("short", [0, 1])
def test_caches_that_would_not_fit_this_machine_are_foreseen(short, tmp_path, monkeypatch, capsys):
    target = tiny_target()
    eagle = tiny_drafter_of(target, "eagle")
    needed = cache_bytes(tiny_bundle(tmp_path / "first", target, trained=eagle).config)
    monkeypatch.setattr("redraft.compiler.bundle.most_bytes", lambda: needed - short)
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_size_of_a_bundle_of_blocks_is_foreseen(tmp_path, ranks):
    """Where the source's matrices are in blocks and where one of a type that no operator reads is in bf16; but for
    tables of RoPE and norms, which are a good part of a tiny model."""
    for types in (MIXED, MIXED | {"ffn_down": "MXFP4"}):
        folder = write_folder(tmp_path / str(len(types["ffn_down"])), types, num_key_value_heads=2)
        target = Target.from_folder(folder, in_blocks=True)
        bundle = tiny_bundle(folder / "b", target, precision="source", drafts=False, tensor_parallel=ranks)
        size = sum(file.stat().st_size for file in bundle.path.rglob("*.weights"))
        assert stored_bytes(target, bundle.config.precision, ranks) == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize(
    ("layers", "backend", "share", "expected"),
    [
        ("qwen3", "openvino", 1.0, 9000),
        ("qwen3", "openvino", 0.5, 2048 + 2 * 1024),
        ("qwen3", "openvino", 1e-9, 2048),
        ("mistral", "openvino", 0.5, 9000),
        ("qwen3", "tensorrt", 1.0, 2048),
    ],
    ids=["whole", "half the memory", "no memory", "windows", "a GPU that is not here"],
)
def test_the_usual_context_is_the_targets_as_far_as_memory_goes(layers, backend, share, expected, monkeypatch):
    """Of windows only the rows of a ring count."""
    target, said = tiny_of(layers, max_position=9000), list[str]()
    config = bundle_config(
        target, {}, LimitsInfo(slots=16, max_len=2048, max_tree=32, prefill_chunk=64), backend=backend
    )
    whole = config.model_copy(update={"limits": config.limits.model_copy(update={"max_len": 9000})})
    monkeypatch.setattr("redraft.compiler.bundle.most_bytes", lambda: int(4 * share * cache_bytes(whole)))
    assert with_usual_context(config, target, said.append).limits.max_len == expected
    if backend == "openvino":
        assert f"contexts of {expected:,} tokens, {'the' if expected == 9000 else 'of the'} target's" in said[0]
        assert "caches of 16 slots take up to" in said[0]
    assert len(said) <= 1
