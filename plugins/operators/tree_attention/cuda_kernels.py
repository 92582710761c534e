"""The kernels of kernel.cu as TensorRT plugins: commit and write, then attention by splits of the keys, then their sum.

TensorRT has a kernel per plugin, and the order between them is that of their tensors: `TreeAttentionSplit` takes the
caches that `TreeAttentionWrite` returns, so every commit and write is there before any key is read.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from math import prod
from pathlib import Path

from redraft.plugins.cuda.declaration import Argument, Kernel, Sizes

SOURCE = Path(__file__).resolve().parent / "kernel.cu"
FP32_SOURCE = SOURCE.with_name("kernel_fp32.cu")
HEAD_SIZES = (64, 96, 128, 256)
THREADS = 128
TILE = 64
"""Queries of a block; half as many with heads wider than 128."""
WRITE_ROWS = 64
WARPS = THREADS // 32
BLOCKS = 528
"""Blocks that `TreeAttentionSplit` shares all keys out to: 4 for each of an H200's 132 multiprocessors."""
FP32_SPLIT_KEYS = 256
"""Keys of every split in fp32."""
ATTRIBUTES = ("heads", "kv_heads", "head_size")

_CACHE = ("cache_slots", "kv_heads", "cache_rows", "head_size")
_K, _V = Argument("k_cache", "bf16", _CACHE), Argument("v_cache", "bf16", _CACHE)
_ROW_OFFSETS = Argument("row_offsets", "int32", ("bounds",))
_SLOTS = Argument("slots", "int32", ("sequences",))
_LENGTHS, _STARTS = (Argument(name, "int32", ("sequences",)) for name in ("cache_lengths", "starts"))
_Q = Argument("q", "bf16", ("rows", "columns"))
_POSITIONS = Argument("positions", "int32", ("rows",))
_PARTIAL, _STATS = (
    Argument(name, "float32", ("places", size)) for name, size in (("partial", "head_size"), ("stats", "two"))
)
_PLAN = Argument("plan", "int32", ("rows", "three"))


def eps_bits(eps: float) -> int:
    """What `TreeAttentionWrite` takes as norm_eps: the bits of the float32, as plugins take no floats. At least 1, the
    smallest float32, since 0 says that there are no norms."""
    return max(1, struct.unpack("<i", struct.pack("<f", eps))[0])


def column_parts(sizes: Sizes) -> int:
    """Parts of a head's columns that warps share out."""
    return 2 if sizes["head_size"] > 128 else 1


def tile(sizes: Sizes) -> int:
    """Queries of a block."""
    return TILE // column_parts(sizes)


def items(sizes: Sizes) -> int:
    """Blocks for a KV head: at most so many tiles of queries, whatever the sequences' lengths, and the shares of all
    keys that these are cut into. See `find_item` in kernel.cu."""
    tiles = sizes["rows"] * (sizes["heads"] // sizes["kv_heads"]) // tile(sizes) + (sizes["bounds"] - 1)
    return tiles + sizes.most(sizes.quotient(BLOCKS, sizes["kv_heads"]), 1)


def places(sizes: Sizes) -> int:
    """Partial results: those of all items' queries. They grow with the rows, so that memory for a profile's largest
    shapes holds all of its shapes."""
    return sizes["items"] * sizes["kv_heads"] * tile(sizes)


WRITE = Kernel(
    name="TreeAttentionWrite",
    source=SOURCE,
    entry="tree_attention_commit_write_{head_size}",
    attributes=(*ATTRIBUTES, "norm_eps"),
    inputs=(
        *(Argument("qkv", "bf16", ("rows", "projections")), _POSITIONS),
        *(_ROW_OFFSETS, _SLOTS, _LENGTHS, _STARTS),
        *(Argument("commit_src", "int32", ("commits",)), Argument("commit_offsets", "int32", ("commit_bounds",))),
        *(Argument("rope_table", "float32", ("max_positions", "head_size")),),
        *(Argument("q_norm", "float32", ("head_size",)), Argument("k_norm", "float32", ("head_size",)), _K, _V),
    ),
    scalars=(
        *("rows", "commits", "commit_bounds", "max_positions", "cache_slots", "cache_rows"),
        *("heads", "kv_heads", "norm_eps"),
    ),
    outputs=(_Q, Argument("k_written", "bf16", _CACHE, "k_cache"), Argument("v_written", "bf16", _CACHE, "v_cache")),
    grid=("kv_heads", "sequences", "parts"),
    threads=THREADS,
    derived={
        "columns": lambda sizes: sizes["heads"] * sizes["head_size"],
        "parts": lambda sizes: (sizes["rows"] + (WRITE_ROWS - 1)) // WRITE_ROWS,
    },
)

SPLIT = Kernel(
    name="TreeAttentionSplit",
    source=SOURCE,
    entry="tree_attention_split_{head_size}",
    attributes=(*ATTRIBUTES, "window"),
    inputs=(
        *(_Q, _ROW_OFFSETS, _SLOTS, _LENGTHS, _STARTS, Argument("tree_mask", "int32", ("rows", "words"))),
        *(_K, _V),
    ),
    scalars=("rows", "sequences", "words", "cache_slots", "cache_rows", "heads", "kv_heads", "window"),
    outputs=(_PARTIAL, _STATS, _PLAN),
    grid=("items", "kv_heads", "one"),
    threads=THREADS,
    derived={"items": items, "places": places, "one": lambda _: 1, "two": lambda _: 2, "three": lambda _: 3},
)

COMBINE = Kernel(
    name="TreeAttentionCombine",
    source=SOURCE,
    entry="tree_attention_combine_{head_size}",
    attributes=ATTRIBUTES,
    inputs=(_PARTIAL, _STATS, _PLAN, _ROW_OFFSETS),
    scalars=("rows", "bounds", "heads", "kv_heads", "items"),
    outputs=(Argument("out", "bf16", ("rows", "columns")),),
    grid=("blocks", "one", "one"),
    threads=THREADS,
    derived={
        "items": lambda sizes: sizes["places"] // (sizes["kv_heads"] * tile(sizes)),
        "columns": lambda sizes: sizes["heads"] * sizes["head_size"],
        "blocks": lambda sizes: (sizes["rows"] * sizes["heads"] * column_parts(sizes) + (WARPS - 1)) // WARPS,
        "one": lambda _: 1,
    },
)

KERNELS = (WRITE, SPLIT, COMBINE)


def _in_fp32(kernel: Kernel) -> Kernel:
    inputs, outputs = (
        tuple(replace(argument, dtype="float32" if argument.dtype == "bf16" else argument.dtype) for argument in part)
        for part in (kernel.inputs, kernel.outputs)
    )
    entry = kernel.entry.replace("_{head_size}", "_fp32_{head_size}")
    return replace(kernel, name=f"{kernel.name}Fp32", source=FP32_SOURCE, entry=entry, inputs=inputs, outputs=outputs)


def fp32_splits(sizes: Sizes) -> int:
    """Parts of the keys in fp32: the same for any number of rows."""
    return (sizes["cache_rows"] + (FP32_SPLIT_KEYS - 1)) // FP32_SPLIT_KEYS


FP32_SPLIT = replace(
    _in_fp32(replace(SPLIT, outputs=(_PARTIAL, _STATS))),
    grid=("tiles", "kv_heads", "splits"),
    derived={
        "tiles": lambda sizes: (sizes["rows"] * (sizes["heads"] // sizes["kv_heads"]) + (WARPS - 1)) // WARPS,
        "splits": fp32_splits,
        "places": lambda sizes: sizes["splits"] * sizes["rows"] * sizes["heads"],
        "two": lambda _: 2,
    },
)
FP32_COMBINE = replace(
    _in_fp32(replace(COMBINE, inputs=(_PARTIAL, _STATS, _POSITIONS, _ROW_OFFSETS, _K))),
    scalars=("rows", "bounds", "heads", "splits"),
    derived={**{name: COMBINE.derived[name] for name in ("columns", "blocks", "one")}, "splits": fp32_splits},
)
FP32_KERNELS = (_in_fp32(WRITE), FP32_SPLIT, FP32_COMBINE)


def partial_bytes(
    split: Kernel, *, rows: int, sequences: int, cache_rows: int, heads: int, kv_heads: int, head_size: int
) -> int:
    """Bytes of the partial results of a call of `split`, which is SPLIT or FP32_SPLIT."""
    sizes = Sizes(rows=rows, bounds=sequences + 1, cache_rows=cache_rows)
    sizes |= {"heads": heads, "kv_heads": kv_heads, "head_size": head_size}
    for name, rule in split.derived.items():
        sizes[name] = rule(sizes)
    return 4 * sum(prod(sizes[size] for size in output.shape) for output in split.outputs)
