"""Bundles for several ranks: what the build script refuses, and what inspect_bundle shows of them."""

from __future__ import annotations

from functools import partial

import pytest

import build_engines
import inspect_bundle
from redraft.bundle import Bundle, BundleConfig, ShardInfo
from tests.build.commands import invoke
from tests.engines.tiny import tiny_lm, write_model

run = partial(invoke, build_engines.main)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two KV groups, tied embeddings."""
    folder = tmp_path_factory.mktemp("model")
    write_model(tiny_lm(), folder)
    return folder


def test_a_bundle_for_two_ranks(model, tmp_path, capsys):
    flags = ["--model", model, "--no-drafter", "--hidden-states", "--max-len", 64, "--precision", "int8"]
    done = run(*flags, "--tensor-parallel", 2, "--output", tmp_path / "b")
    assert done.exit_code == 0, done.output
    bundle = Bundle.load(tmp_path / "b")
    assert bundle.config.shards == (ShardInfo(num_kv_heads=1, vocab_size=64), ShardInfo(num_kv_heads=1, vocab_size=47))
    files = {f"rank{rank}/target.{kind}" for rank in (0, 1) for kind in ("onnx", "weights")}
    assert files < set(bundle.manifest.files)
    assert "target.onnx" not in bundle.manifest.files
    inspect_bundle.main(tmp_path / "b")
    printed = capsys.readouterr().out
    assert "1 KV heads, 47 of the vocabulary's logits" in printed
    assert "6 AllReduce" in printed
    (tmp_path / "b" / "rank1" / "target.weights").write_bytes(b"")
    with pytest.raises(Exception, match=r"rank1/target.weights has 0 bytes"):
        Bundle.load(tmp_path / "b")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--tensor-parallel", 3], "3 tensor-parallel ranks: expected 1 to 2, the target's number of KV groups"),
        (
            ["--tensor-parallel", 2, "--backend", "tensorrt_rtx"],
            "engines are for one GPU; choose --backend openvino or torch, or",
        ),
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
            name="b", backend="openvino", precision="fp32", target=build_engines.target_info(tiny_lm()),
            limits={"slots": 1, "max_len": 9, "max_tree": 1, "prefill_chunk": 1}, methods={}, tensor_parallel=2,
        )  # fmt: skip
