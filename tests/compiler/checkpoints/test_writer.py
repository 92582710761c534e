"""Weights that are written chunk by chunk, in one file or several."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from redraft.compiler.checkpoints.writer import write_weights
from redraft.model_defs import files as model_files
from redraft.model_defs.files import INDEX, StoredTensors, row_chunks, weight_files

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=7)


def cut(weights):
    return lambda name: (weights[name][rows] for rows in row_chunks(tuple(weights[name].shape)))


@settings(max_examples=40)
@given(shapes=SHAPES, chunk=st.integers(1, 40), shard_bytes=st.integers(1, 400), seed=st.integers(0, 99))
def test_any_division_holds_the_same_weights(tmp_path_factory, shapes, chunk, shard_bytes, seed):
    folder = tmp_path_factory.mktemp("weights")
    generator = torch.Generator().manual_seed(seed)
    weights = {f"w{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_files, "CHUNK", chunk)
        write_weights(folder, {name: tuple(w.shape) for name, w in weights.items()}, cut(weights), written.append,
                      shard_bytes)  # fmt: skip
    files = weight_files(folder)
    assert sum(written) == sum(2 * weight.numel() for weight in weights.values())
    assert (folder / INDEX).exists() == (len(files) > 1)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
        assert len(sizes) == 1 or sum(sizes) <= shard_bytes
    with StoredTensors.open(files) as stored:
        assert stored.shapes().keys() == weights.keys()
        assert all(torch.equal(stored.read(name), weight.bfloat16()) for name, weight in weights.items())


def test_a_single_file_is_the_librarys(tmp_path):
    weights = {f"layers.{i}.{kind}": torch.randn(3, 5 + i) for i in (10, 2) for kind in ("up", "down")}
    write_weights(tmp_path, {name: tuple(weight.shape) for name, weight in weights.items()}, cut(weights))
    stored = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(stored, tmp_path / "expected.safetensors", {"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
