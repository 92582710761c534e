"""Where a step's time goes, and products in FP8: at the sizes of a CPU, whose operators stand for a GPU's kernels."""

import json

import pytest
import torch

from benchmarks.gpu import matmuls, profile
from benchmarks.gpu.matmuls import FP8_ROW, FP8_TENSOR


def test_a_steps_operators_are_summed_by_name(tmp_path):
    output = tmp_path / "r.json"
    sizes = ["--shape", "tiny", "--context", "8", "--batches", "1", "3", "--rows", "1", "4", "--replays", "2"]
    profile.main(["--device", "cpu", "--output", str(output), *sizes])
    steps = json.loads(output.read_text())["steps"]
    assert [(step["batch"], step["rows"]) for step in steps] == [(1, 1), (1, 4), (3, 1), (3, 4)]
    for step in steps:
        times = [kernel["microseconds"] for kernel in step["kernels"]]
        assert times == sorted(times, reverse=True)
        assert sum(times) == pytest.approx(step["kernel_microseconds"])
        (attention,) = (kernel for kernel in step["kernels"] if kernel["kernel"] == "redraft::tree_attention")
        assert attention["calls"] == 6, "one of each layer, per step"


@pytest.mark.parametrize("way", [FP8_TENSOR, FP8_ROW])
@pytest.mark.parametrize("rows", [1, 16])
def test_products_in_fp8_are_those_of_bf16_but_for_rounding(way, rows):
    torch.manual_seed(0)
    x, weight = (torch.randn(count, 160).bfloat16() for count in (rows, 96))
    (call,) = matmuls.calls_of(way, x, [weight])
    expected = x.float() @ weight.float().T
    assert (call().float() - expected).norm() / expected.norm() < 0.06


def test_every_product_is_timed_in_every_way(tmp_path):
    output = tmp_path / "r.json"
    matmuls.main(["--device", "cpu", "--output", str(output), "--shape", "tiny", "--rows", "1", "3", "--repeats", "1"])
    results = json.loads(output.read_text())["products"]
    assert len(results) == 5 * 2 * len(matmuls.WAYS)
    assert all(entry.get("microseconds", 0) > 0 or entry["error"] for entry in results)


def test_what_a_gpu_refuses_is_an_answer(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("not on this GPU\nmore")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    results = matmuls.measure(matmuls.SHAPES["tiny"], [1], torch.device("cpu"), 1)
    assert {entry["way"] for entry in results if entry.get("error") == "not on this GPU"} == {FP8_TENSOR, FP8_ROW}
    assert "nan" in str(matmuls.table(results, 2).rows)
