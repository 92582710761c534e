"""What TensorRT computes of the kernels' declarations for whole ranges of shapes: memory that holds every launch, and
launch parameters that are positive and fit an int32."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from redraft.bundle.config import LimitsInfo
from redraft.engines.tensorrt import profiles
from redraft.plugins.cuda.declaration import Kernel, Sizes
from redraft.plugins.operators.tree_attention.cuda_kernels import (
    BLOCKS,
    FP32_SPLIT,
    KERNELS,
    SPLIT,
    partial_bytes,
    tile,
)

HEADS = {
    "SmolLM2-135M": (9, 3, 64),
    "Llama-3-8B": (32, 8, 128),
    "Llama-2-7B": (32, 32, 128),
    "one KV head": (64, 1, 128),
    "Gemma-3-1B": (4, 1, 256),
}
LIMITS = [
    LimitsInfo(slots=1, max_len=64, max_tree=1, prefill_chunk=1),
    LimitsInfo(slots=16, max_len=2048, max_tree=32, prefill_chunk=512),
    LimitsInfo(slots=64, max_len=131072, max_tree=64, prefill_chunk=2048),
]
MOST = 2**31 - 1
MOST_GRID = (MOST, 65535, 65535)
"""Blocks of a launch in each direction, on every GPU."""


def known(limits: LimitsInfo, heads: str, rows: Any, bounds: Any, sequences: Any) -> dict[str, Any]:
    count, kv_heads, head_size = HEADS[heads]
    return {
        **{"rows": rows, "bounds": bounds, "sequences": sequences, "commit_bounds": bounds},
        **{"projections": (count + 2 * kv_heads) * head_size, "columns": count * head_size, "head_size": head_size},
        **{"words": -(-limits.max_tree // 32), "max_positions": limits.max_len + limits.max_tree},
        **{"cache_slots": limits.slots, "cache_rows": limits.max_len + limits.max_tree, "two": 2},
        **{"commits": sequences * limits.max_tree, "kv_heads": kv_heads, "heads": count, "window": 1, "norm_eps": 1},
    }


def sizes_of(kernel: Kernel, given: dict[str, Any], kind: type[Sizes] = Sizes) -> Sizes:
    attributes = {name: given[name] for name in kernel.attributes}
    shapes = [[given[size] for size in argument.shape] for argument in kernel.inputs]
    return kernel.sizes(shapes, attributes, kind)


def most_places(sizes: Sizes, sequences: int) -> int:
    """Partial results of a batch with the most tiles: one row of each sequence, the others of the last. Shares of the
    keys make one more part each."""
    group, kv_heads, size = sizes["heads"] // sizes["kv_heads"], sizes["kv_heads"], tile(sizes)
    single = min(sequences, sizes["rows"]) - 1
    tiles = sum(-(-rows * group // size) for rows in [1] * single + [sizes["rows"] - single])
    return (tiles + max(BLOCKS // kv_heads, 1)) * kv_heads * size


@pytest.mark.parametrize("kernel", [SPLIT, FP32_SPLIT], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("heads", HEADS)
def test_no_launch_exceeds_the_memory_of_the_partial_results(kernel, heads):
    """Which grows with the rows, so that memory for a profile's largest shapes holds all of its shapes."""
    for limits, sequences in itertools.product(LIMITS, (1, 2, 3, 16, 63)):
        before = 0
        for rows in (*range(1, 200), *range(200, 6000, 37)):
            sizes = sizes_of(kernel, known(limits, heads, rows, sequences + 1, sequences))
            needed = sizes["splits"] * rows * sizes["heads"] if kernel is FP32_SPLIT else most_places(sizes, sequences)
            assert needed <= sizes["places"]
            assert sizes["places"] >= before
            before = sizes["places"]
            for name, most in zip(kernel.grid, MOST_GRID, strict=True):
                assert 0 < sizes[name] <= most


def test_partial_results_take_little_memory():
    """Of Llama-3-8B's largest step, 39 MB, where a product of the most parts and the most rows would be 1.1 GB."""
    given = known(LIMITS[1], "Llama-3-8B", 1024, 17, 16)
    assert sizes_of(SPLIT, given)["places"] == (1024 * 4 // 64 + 16 + 66) * 8 * 64
    small = partial_bytes(SPLIT, rows=1, sequences=1, cache_rows=2048, heads=4, kv_heads=1, head_size=256)
    assert small < 18e6, "as much with wider heads"


@pytest.mark.parametrize("kernel", [SPLIT, FP32_SPLIT], ids=lambda kernel: kernel.name)
def test_partial_results_are_counted_as_they_are_launched(kernel):
    given = known(LIMITS[1], "Llama-3-8B", 752, 17, 16)
    shape = {name: given[name] for name in ("rows", "sequences", "cache_rows", "heads", "kv_heads", "head_size")}
    places = sizes_of(kernel, given)["places"]
    plan = 0 if kernel is FP32_SPLIT else 3 * 752
    assert partial_bytes(kernel, **shape) == 4 * (places * (128 + 2) + plan)
    if kernel is FP32_SPLIT:
        assert places == 9 * 752 * 32, "9 splits of 256 hold 2,080 keys"


@dataclass(frozen=True)
class Interval:
    """All integers from `low` to `high`, under the operators that declarations use."""

    low: int
    high: int

    @classmethod
    def of(cls, x: Any) -> Interval:
        return x if isinstance(x, Interval) else cls(x, x)

    def _with(self, other: Any, operation) -> Interval:
        other = self.of(other)
        corners = [operation(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        return Interval(min(corners), max(corners))

    def __add__(self, other: Any) -> Interval:
        return self._with(other, int.__add__)

    def __sub__(self, other: Any) -> Interval:
        return self._with(other, int.__sub__)

    def __mul__(self, other: Any) -> Interval:
        return self._with(other, int.__mul__)

    def __floordiv__(self, other: Any) -> Interval:
        assert self.of(other).low > 0, "a division by zero"
        return self._with(other, int.__floordiv__)


class Intervals(Sizes):
    def least(self, a: Any, b: Any) -> Interval:
        return Interval.of(a)._with(b, min)

    def most(self, a: Any, b: Any) -> Interval:
        return Interval.of(a)._with(b, max)

    def quotient(self, a: Any, b: Any) -> Interval:
        return Interval.of(a) // b


@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: f"{limits.slots} slots")
@pytest.mark.parametrize("heads", HEADS)
def test_launch_parameters_fit_for_all_shapes_of_every_profile(heads, limits):
    """By intervals, as wide as a compiler's: no grid is empty, no size overflows an int32, and neither does what the
    kernels compute in one."""
    shapes = profiles.plugin_target_shapes(limits)
    for low, _, high in profiles.plugin_target(limits).profiles:
        ends = [{name: leading[0] for name, leading in shapes(bucket).items()} for bucket in (low, high)]
        rows, bounds = (Interval(ends[0][name], ends[1][name]) for name in ("input_ids", "row_offsets"))
        given = known(limits, heads, rows, bounds, Interval(low.sequences, high.sequences))
        for kernel in KERNELS:
            if "places" in [size for argument in kernel.inputs for size in argument.shape]:
                given |= sizes_of(SPLIT, given, Intervals)
            sizes = sizes_of(kernel, given, Intervals)
            for name, most in zip(kernel.grid, MOST_GRID, strict=True):
                assert 0 < Interval.of(sizes[name]).low <= Interval.of(sizes[name]).high <= most, (kernel.name, name)
            for name in (*kernel.scalars, *(size for output in kernel.outputs for size in output.shape)):
                assert 0 < Interval.of(sizes[name]).low <= Interval.of(sizes[name]).high <= MOST, (kernel.name, name)
        count, kv_heads, head_size = HEADS[heads]
        assert rows.high * (count // kv_heads + 2) * head_size <= MOST, "the items of a block that writes rows"
