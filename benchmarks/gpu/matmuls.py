"""The matrix products of an 8B's step in bf16 and in FP8: does FP8 halve what they take?

    python -m benchmarks.gpu.matmuls

Each product of a layer, and the head, for several numbers of rows: in bf16 as torch chooses, in bf16 by cuBLASLt, and
in FP8 (E4M3) with one scale per tensor or per row and channel, over activations that are quantized before. The last way
is the operator of a bundle, which quantizes them itself: FP8 pays where it takes at most the share of bf16 in GOALS.
Weights are used in turn, more of them than a GPU's L2 cache holds. A way that this GPU or torch refuses is an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import Repeats, console, run
from benchmarks.gpu.check_kernels import CACHED_BYTES, seconds
from benchmarks.gpu.llama_7b import SHAPES, Rows, Shape
from benchmarks.gpu.machine import Device, Output, device_of, write_report
from redraft.loadtest.tables import Table
from redraft.model_defs.target.config import TargetConfig
from redraft.plugins.operators.fp8_linear.reference import quantize_rows
from redraft.plugins.operators.fp8_linear.torch_op import fp8_linear

BF16 = torch.bfloat16
BF16_WAY, CUBLASLT, FP8_TENSOR, FP8_ROW = "bf16", "bf16 by cuBLASLt", "fp8 per tensor", "fp8 per row"
OPERATOR = "fp8 of a bundle"
WAYS = (BF16_WAY, CUBLASLT, FP8_TENSOR, FP8_ROW, OPERATOR)
GOALS = {16: 0.7, 512: 0.6}
"""The share of bf16's time that the operator may take at so many rows"""
MOST_COPIES = 16


def products(config: TargetConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each product, by name."""
    heads = config.num_heads * config.head_size
    qkv = heads + 2 * config.num_kv_heads * config.head_size
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "qkv": (hidden, qkv),
        "attention out": (heads, hidden),
        "gate and up": (hidden, 2 * inner),
        "down": (inner, hidden),
        "head": (hidden, config.vocab_size // 16 * 16),
    }


def quantize(matrix: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    """A matrix [N, K] in E4M3, and its scales float32: [N, 1], or one for all, [1, 1]."""
    codes, scale = quantize_rows(matrix if per_row else matrix.reshape(1, -1))
    return codes.reshape(matrix.shape), scale[:, None]


def calls_of(way: str, x: Tensor, weights: list[Tensor]) -> list[Callable[[], Tensor]]:
    """The product of x [M, K] with each of the weights [N, K]."""
    if way in (BF16_WAY, CUBLASLT):
        return [lambda w=weight: x @ w.T for weight in weights]  # type: ignore[misc]
    quantized = [quantize(weight, way != FP8_TENSOR) for weight in weights]
    if way == OPERATOR:
        return [lambda w=codes, s=scale[:, 0]: fp8_linear(x, w, s) for codes, scale in quantized]  # type: ignore[misc]
    codes_of_x, scale_of_x = quantize(x, way == FP8_ROW)
    return [
        lambda w=codes, s=scale: torch._scaled_mm(  # type: ignore[misc]
            codes_of_x, w.T, scale_a=scale_of_x, scale_b=s.T, out_dtype=BF16, use_fast_accum=True
        )
        for codes, scale in quantized
    ]


def time_way(way: str, x: Tensor, weights: list[Tensor], repeats: int) -> float:
    """Microseconds of one product: the median over `repeats` rounds of all weights, on a GPU a graph's."""
    on_gpu = x.device.type == "cuda"
    if on_gpu:
        torch.backends.cuda.preferred_blas_library("cublaslt" if way == CUBLASLT else "default")
    calls = calls_of(way, x, weights)

    def round_() -> None:
        for call in calls:
            call()

    if on_gpu:
        return seconds(round_, repeats) / len(calls) * 1e6
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        round_()
        taken.append(time.perf_counter() - begun)
    return median(taken) / len(calls) * 1e6


@torch.inference_mode()
def measure(config: TargetConfig, rows: list[int], device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Every product in every way for every number of rows: microseconds, or what refused it."""
    results = []
    for name, (inputs, outputs) in products(config).items():
        copies = min(MOST_COPIES, max(1, CACHED_BYTES // (inputs * outputs)))
        weights = [torch.randn(outputs, inputs, device=device).to(BF16) * inputs**-0.5 for _ in range(copies)]
        for count in rows:
            x = torch.randn(count, inputs, device=device).to(BF16)
            for way in WAYS:
                entry: dict[str, Any] = {"product": name, "rows": count, "way": way}
                try:
                    entry["microseconds"] = time_way(way, x, weights, repeats)
                except (RuntimeError, NotImplementedError, ValueError) as error:
                    entry["error"] = str(error).splitlines()[0]
                results.append(entry)
        del weights
    return results


def sums(results: list[dict[str, Any]], layers: int) -> dict[int, dict[str, float]]:
    """A step's products by rows and way: milliseconds of all layers and the head."""
    found: dict[int, dict[str, float]] = {}
    for entry in results:
        times = 1 if entry["product"] == "head" else layers
        ways = found.setdefault(entry["rows"], dict.fromkeys(WAYS, 0.0))
        ways[entry["way"]] += times * entry.get("microseconds", float("nan")) / 1e3
    return found


def table(found: dict[int, dict[str, float]]) -> Table:
    """Those with each way's share of bf16's."""
    result = Table("all products of a step, ms (share of bf16)", ["rows", *WAYS])
    for count, ways in found.items():
        result.rows.append([str(count), *(f"{ms:.2f} ({ms / ways[BF16_WAY]:.2f})" for ms in ways.values())])
    return result


def verdicts(found: dict[int, dict[str, float]]) -> list[dict[str, Any]]:
    """The operator's share of bf16's time at the rows of GOALS, and whether it pays."""
    shares = {rows: found[rows][OPERATOR] / found[rows][BF16_WAY] for rows in GOALS if rows in found}
    return [{"rows": n, "share": share, "goal": GOALS[n], "pays": share <= GOALS[n]} for n, share in shares.items()]


def main(
    device: Device = "cuda",
    shape: Shape = "llama-3.1-8b",
    rows: Rows = [1, 8, 16, 32, 64, 128, 512],
    repeats: Repeats = 10,
    output: Output = None,
) -> None:
    on_device = device_of(device, output)
    torch.manual_seed(0)
    results = measure(SHAPES[shape], rows, on_device, repeats)
    found = sums(results, SHAPES[shape].num_layers)
    table(found).show(console)
    for verdict in verdicts(found):
        console.print("fp8 at {rows} rows: {share:.2f} of bf16, the goal is {goal}".format(**verdict))
    for refused in sorted({f"{entry['way']}: {entry['error']}" for entry in results if "error" in entry}):
        console.print(refused, markup=False)
    write_report(output, __file__, on_device, {"shape": shape, "products": results, "verdicts": verdicts(found)})


if __name__ == "__main__":
    run(main)
