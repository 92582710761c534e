"""The matrix products of an 8B's step in bf16 and in FP8: does FP8 halve what they take?

    python -m benchmarks.gpu.matmuls

Each product of a layer, and the head, for several numbers of rows: in bf16 as torch chooses, in bf16 by cuBLASLt, and
in FP8 (E4M3) with one scale per tensor or per row and channel. Quantizing activations is not in these times.
Weights are used in turn, more of them than a GPU's L2 cache holds. A way that this GPU or torch refuses is an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.command import Repeats, console, run
from benchmarks.gpu.check_kernels import CACHED_BYTES, seconds
from benchmarks.gpu.llama_7b import SHAPES, Rows, Shape
from benchmarks.gpu.machine import Device, Output, device_of, write_report
from redraft.loadtest.tables import Table
from redraft.model_defs.target.config import TargetConfig

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
LARGEST = torch.finfo(E4M3).max
BF16_WAY, CUBLASLT, FP8_TENSOR, FP8_ROW = "bf16", "bf16 by cuBLASLt", "fp8 per tensor", "fp8 per row"
WAYS = (BF16_WAY, CUBLASLT, FP8_TENSOR, FP8_ROW)
MOST_COPIES = 16


class Quantized(NamedTuple):
    """A matrix [N, K] in E4M3 and its scales in float32, [1, 1] or [N, 1]."""

    values: Tensor
    scale: Tensor


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


def quantize(matrix: Tensor, per_row: bool) -> Quantized:
    """A matrix [N, K] with the scale that takes its largest value, of all or of each row, to E4M3's largest."""
    largest = matrix.abs().amax(dim=1, keepdim=True) if per_row else matrix.abs().max().reshape(1, 1)
    scale = (largest.float() / LARGEST).clamp(min=1e-12)
    return Quantized((matrix.float() / scale).to(E4M3), scale)


def calls_of(way: str, x: Tensor, weights: list[Tensor]) -> list[Callable[[], Tensor]]:
    """The product of x [M, K] with each of the weights [N, K]."""
    if way in (BF16_WAY, CUBLASLT):
        return [lambda w=weight: x @ w.T for weight in weights]  # type: ignore[misc]
    per_row = way == FP8_ROW
    given, quantized = quantize(x, per_row), [quantize(weight, per_row) for weight in weights]
    return [
        lambda w=weight: torch._scaled_mm(  # type: ignore[misc]
            given.values, w.values.T, scale_a=given.scale, scale_b=w.scale.T, out_dtype=BF16, use_fast_accum=True
        )
        for weight in quantized
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


def table(results: list[dict[str, Any]], layers: int) -> Table:
    """A step's products by rows: milliseconds of all layers and the head in each way, and FP8's share of bf16's."""
    result = Table("all products of a step, ms (share of bf16)", ["rows", *WAYS])
    for count in dict.fromkeys(entry["rows"] for entry in results):
        sums = dict.fromkeys(WAYS, 0.0)
        for entry in results:
            if entry["rows"] == count:
                times = 1 if entry["product"] == "head" else layers
                sums[entry["way"]] += times * entry.get("microseconds", float("nan")) / 1e3
        result.rows.append([str(count), *(f"{ms:.2f} ({ms / sums[BF16_WAY]:.2f})" for ms in sums.values())])
    return result


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
    table(results, SHAPES[shape].num_layers).show(console)
    for refused in sorted({f"{entry['way']}: {entry['error']}" for entry in results if "error" in entry}):
        console.print(refused, markup=False)
    write_report(output, __file__, on_device, {"shape": shape, "products": results})


if __name__ == "__main__":
    run(main)
