"""Times one forward of a SmolLM2-135M-shaped network as a chain of kernel calls, for several row counts.

python -m benchmarks.speed.kernels --precision bf16 --context 256 --rows 1 2 4 8 16 32
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import Repeats, console, run
from benchmarks.speed import kernel_calls
from redraft.bundle.backends import Precision
from redraft.plugins import kernels
from redraft.plugins.operators.linear.pack import PRECISIONS, PackedWeight, pack
from redraft.plugins.operators.tree_attention.reference import rope_table

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, MLP, VOCABULARY = 30, 576, 9, 3, 64, 1536, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
SHAPES = {"qkv": (QKV, HIDDEN), "out": (HIDDEN, HIDDEN), "gate_up": (2 * MLP, HIDDEN), "down": (HIDDEN, MLP)}


class Network:
    """Random weights and `slots` caches of `cache_rows` rows; attributes are packed arrays."""

    def __init__(self, precision: str, cache_rows: int, slots: int, layers: int = LAYERS):
        rng = np.random.default_rng(0)
        self.layers = [
            {
                name: pack(_normal(rng, n, k), precision, "swiglu" if name == "gate_up" else "none")
                for name, (n, k) in SHAPES.items()
            }
            for _ in range(layers)
        ]
        self.head = pack(_normal(rng, VOCABULARY, HIDDEN), precision)
        self._lay_out()
        self.norm = np.ones(HIDDEN, np.float32)
        shape = (slots, KV_HEADS, cache_rows, HEAD_SIZE)
        cache_type = np.float32 if precision == "fp32" else np.uint16
        self.caches = [(np.zeros(shape, cache_type), np.zeros(shape, cache_type)) for _ in range(layers)]
        self.rope = rope_table(cache_rows, HEAD_SIZE).numpy()

    def _lay_out(self) -> None:
        """Move the weights into one piece of memory, each to a cache line, as an engine has them."""
        packed = [*(weight for layer in self.layers for weight in layer.values()), self.head]
        begins = np.cumsum([0, *(-(-weight.data.size // 64) * 64 for weight in packed)])
        memory = np.empty(begins[-1] + 63, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :]
        moved = []
        for weight, begin in zip(packed, begins, strict=False):
            data = memory[begin : begin + weight.data.size]
            data[:] = weight.data
            moved.append(weight._replace(data=data))
        *moved, self.head = moved
        self.layers = [dict(zip(SHAPES, moved[i : i + 4], strict=True)) for i in range(0, len(moved), 4)]

    def forward(self, ids: np.ndarray, batch: list[np.ndarray]) -> np.ndarray:
        """ids int32 [T]; batch: TreeAttention's inputs 1 to 7; returns logits float32 [T, vocabulary]."""
        x = kernel_calls.embedding(ids, self.head, HIDDEN, VOCABULARY)
        for weights, caches in zip(self.layers, self.caches, strict=True):
            qkv = self._linear(x, weights["qkv"], QKV, norm=self.norm)
            arrays: Any = (qkv, *batch, self.rope, *caches)
            attended = kernel_calls.tree_attention(*arrays, num_heads=HEADS)
            x = self._linear(attended, weights["out"], HIDDEN, residual=x)
            hidden = self._linear(x, weights["gate_up"], MLP, norm=self.norm, activation="swiglu")
            x = self._linear(hidden, weights["down"], HIDDEN, residual=x)
        return self._linear(x, self.head, VOCABULARY, norm=self.norm)

    def _linear(self, x: np.ndarray, weight: PackedWeight, n: int, **options: Any) -> np.ndarray:
        return kernel_calls.linear(x, weight, n, **options)


PARTS = ["embedding", *["qkv", "attention", "out", "gate_up", "down"] * LAYERS, "head"]


def milliseconds_by_part(recording: kernel_calls.Recording, repeats: int) -> dict[str, float]:
    """The sum over layers of each operator's mean time."""
    totals = dict.fromkeys(PARTS, 0.0)
    for _ in range(repeats):
        for name, (function, arguments) in zip(PARTS, recording.calls, strict=True):
            start = time.perf_counter()
            function(*arguments)
            totals[name] += (time.perf_counter() - start) * 1e3 / repeats
    return totals


def batch_inputs(rows: int, sequences: int, context: int) -> list[np.ndarray]:
    """Each sequence has `rows` rows that see all rows before them."""
    total = rows * sequences
    return [
        np.tile(np.arange(context, context + rows, dtype=np.int32), sequences),
        np.arange(0, total + 1, rows, dtype=np.int32),
        np.arange(sequences, dtype=np.int32),
        np.full(sequences, context, np.int32),
        np.zeros((total, 1), np.int32),
        np.zeros(0, np.int32),
        np.zeros(sequences + 1, np.int32),
    ]


def _normal(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    return rng.standard_normal((n, k), dtype=np.float32) * np.float32(k**-0.5)


def main(
    precision: Annotated[
        Precision, typer.Option(help=f"Stored form of the weights: {', '.join(PRECISIONS)}.")
    ] = Precision.bf16,
    context: Annotated[int, typer.Option(help="Tokens in the cache.")] = 256,
    rows: Annotated[list[int], typer.Option(help="Rows of each sequence.")] = [1, 2, 4, 8, 16, 32, 64],
    sequences: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    repeats: Repeats = 40,
    parts: Annotated[bool, typer.Option("--parts", help="Print milliseconds per operator.")] = False,
) -> None:
    if precision not in PRECISIONS:
        raise typer.BadParameter(f"--precision {precision}: expected one of {', '.join(PRECISIONS)}")
    network = Network(precision, context + max(rows), sequences)
    console.print(f"{precision}, {kernels.isa()}, {kernels.threads()} threads, {sequences} x context {context}")
    for count in rows:
        with kernel_calls.Recording() as recording:
            network.forward(np.zeros(count * sequences, np.int32), batch_inputs(count, sequences, context))
        times = []
        for _ in range(repeats + 3):
            start = time.perf_counter()
            recording.replay()
            times.append((time.perf_counter() - start) * 1e3)
        line = f"rows {count:4d}: median {np.median(times[3:]):6.2f} ms, best {np.min(times[3:]):6.2f} ms"
        if parts:
            spent = milliseconds_by_part(recording, repeats)
            line += "  " + ", ".join(f"{name} {ms:.2f}" for name, ms in spent.items())
        console.print(line)


if __name__ == "__main__":
    run(main)
