"""Bundles for several ranks: what the build script refuses, and what inspect shows of them."""

from __future__ import annotations

import json
from functools import partial

import onnx
import pytest

from redraft.bundle.config import BundleConfig, ShardInfo
from redraft.bundle.manifest import Bundle
from redraft.cli import build, inspect
from redraft.compiler.bundle import target_info
from redraft.compiler.calibration import calibrate
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from tests.cli.commands import invoke
from tests.engines.tensorrt import stand_in_tensorrt
from tests.engines.tiny import tiny_lm, write_model

run = partial(invoke, build.main)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two KV groups, tied embeddings."""
    folder = tmp_path_factory.mktemp("model")
    write_model(tiny_lm(), folder)
    return folder


def test_a_bundle_for_two_ranks(model, tmp_path, capsys):
    flags = ["--model", model, "--no-drafter", "--features", "--max-len", 64, "--precision", "int8"]
    done = run(*flags, "--tp", 2, "--output", tmp_path / "b")
    assert done.exit_code == 0, done.output
    bundle = Bundle.load(tmp_path / "b")
    assert bundle.config.shards == (ShardInfo(num_kv_heads=1, vocab_size=64), ShardInfo(num_kv_heads=1, vocab_size=47))
    files = {f"rank{rank}/target.{kind}" for rank in (0, 1) for kind in ("onnx", "weights")}
    assert files < set(bundle.manifest.files)
    assert "target.onnx" not in bundle.manifest.files
    inspect.main(tmp_path / "b")
    printed = capsys.readouterr().out
    assert "1 KV heads, 47 of the vocabulary's logits" in printed
    assert "6 AllReduce" in printed
    (tmp_path / "b" / "rank1" / "target.weights").write_bytes(b"")
    with pytest.raises(Exception, match=r"rank1/target.weights has 0 bytes"):
        Bundle.load(tmp_path / "b")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_engines_of_tensorrt_for_rtx_for_two_ranks(model, tmp_path, capsys, precision):
    """Built by the library itself, with prefill chunks longer than a sequence: each rank has its heads and logits, and
    only rank 0 gives hidden states. It would catch a rank's network that the library refuses."""
    flags = ["--model", model, "--no-drafter", "--features", "--max-len", 64, "--max-tree", 16]
    flags += ["--backend", "tensorrt_rtx", "--precision", precision]
    if precision == "fp8":
        target = Target.from_folder(model)
        calibrate(target, target_fingerprint(target), [list(range(20, 45))]).save(tmp_path / "c.json")
        flags += ["--calibration", tmp_path / "c.json"]
    done = run(*flags, "--tp", 2, "--output", tmp_path / "b")
    assert done.exit_code == 0, done.output
    bundle = Bundle.load(tmp_path / "b")
    for rank, columns in enumerate((64, 47)):
        folder = bundle.path / f"rank{rank}"
        graph = onnx.load(folder / "target.onnx", load_external_data=False).graph
        shapes = {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*graph.input, *graph.output)
        }
        assert shapes["k_cache.2"] == shapes["k_cache.2.updated"] == ["B", 1, 64 + 16, 64]
        assert shapes["logits"] == ["R", columns]
        assert ("features" in shapes) == (rank == 0)
        sums = [node for node in graph.node if node.op_type == "DistCollective"]
        assert [onnx.helper.get_node_attr_value(node, "nb_rank") for node in sums] == [2] * 6
        report = json.loads((folder / "target.engine.json").read_text())
        assert report["layers"]["DIST_COLLECTIVE"] == 6
        assert ("QUANTIZE" in report["layers"]) == (precision == "fp8")
    inspect.main(tmp_path / "b")
    assert "6 DistCollective" in capsys.readouterr().out


def test_a_tensorrt_without_sums_over_gpus_is_refused(monkeypatch, model, tmp_path):
    trt = stand_in_tensorrt.install(monkeypatch, "tensorrt")
    trt.__version__ = "10.16.1.11"
    flags = ["--model", model, "--no-drafter", "--max-len", 64, "--backend", "tensorrt", "--output", tmp_path / "b"]
    done = run(*flags, "--tp", 2)
    assert done.exit_code == 1
    assert "needs TensorRT 11.0 or newer for 2 ranks, this is 10.16.1.11" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--tp", 3], "3 tensor-parallel ranks: expected 1 to 2, the target's number of KV groups"),
    ],
)
def test_refused(model, tmp_path, flags, reason):
    done = run("--model", model, "--no-drafter", "--max-len", 64, *flags, "--output", tmp_path / "b")
    assert done.exit_code == 1
    assert reason in " ".join(done.output.split())
    assert not (tmp_path / "b").exists()


def test_ranks_without_shards():
    with pytest.raises(ValueError, match="0 shards for 2 ranks: expected 2"):
        BundleConfig(
            name="b", backend="openvino", precision="fp32", target=target_info(tiny_lm()),
            limits={"slots": 1, "max_len": 9, "max_tree": 1, "prefill_chunk": 1}, methods={}, tensor_parallel=2,
        )  # fmt: skip
