"""A bundle's need of GPU memory, and which limits would fit where it is too much."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from redraft.bundle.backends import TORCH, Backend, Precision
from redraft.bundle.config import BundleConfig, TargetInfo, target_folder
from redraft.bundle.manifest import Bundle
from redraft.bundle.method import ContextInfo
from redraft.console.resources import host_bytes
from redraft.engines.cuda.buckets import draft_buckets, most_rows
from redraft.engines.cuda.sampling import AT_ONCE, DRAW_BYTES
from redraft.errors import BundleError
from redraft.plugins.operators.tree_attention.cuda_kernels import FP32_SPLIT, SPLIT, partial_bytes

WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 2, "int4": 2, "source": 2}
"""Bytes of a cached number."""
WORKING = 18
"""Numbers that a torch program holds at once for a row of a layer, in units of the hidden size: 4 for each of an MLP
that is 3.5 times as wide, and some. Measured with Llama's shapes on tensors without storage."""
ATTENTION = 7
"""Numbers for a row in the same units that are held while attention executes, its partial results apart: input, norm,
queries, keys, values, rotated queries and result."""
CHAIN_COPIES = 3
"""Copies of a chain's raw logits: the results, and the inputs of all buckets, whose sequences double."""
COPIES_WHILE_BUILDING = 2
"""Copies of the weights that TensorRT holds: the network and the engine."""


def target_cache_bytes(config: BundleConfig) -> int:
    """Bytes of the target's caches."""
    rows = sum(map(config.cache_rows, range(config.target.num_layers)))
    return config.limits.slots * rows * _row_bytes(config, config.target)


def cache_bytes(config: BundleConfig) -> int:
    """Bytes of all caches."""
    limits, contexts = config.limits, [method.context for method in config.methods.values() if method.context]
    rows = limits.slots * (limits.max_len + limits.max_tree)
    return target_cache_bytes(config) + rows * sum(context.layers * _row_bytes(config, context) for context in contexts)


def _row_bytes(config: BundleConfig, heads: TargetInfo | ContextInfo) -> int:
    """Bytes of a token's keys and values in a layer."""
    return 2 * heads.num_kv_heads * heads.head_size * WIDTH.get(config.precision, 2)


def unaligned_caches(config: BundleConfig, max_len: int) -> list[int]:
    """Per-slot sizes, in bytes, of the caches that would break the backend's alignment with this `max_len`."""
    targets = [of_rank(config, rank).target for rank in range(config.tensor_parallel)]
    contexts = [method.context for method in config.methods.values() if method.context]
    caches: list[tuple[TargetInfo | ContextInfo, int]] = [(target, config.limits.max_tree) for target in targets]
    caches += [(context, context.draft_rows) for context in contexts]
    width = WIDTH.get(config.precision, 2)
    sizes = [(max_len + behind) * heads.num_kv_heads * heads.head_size * width for heads, behind in caches]
    return [size for size in sizes if size % config.backend.cache_alignment]


def output_bytes(config: BundleConfig) -> int:
    """Bytes of the largest decode step's logits, and for torch of the largest step's features, which all other steps
    share."""
    limits, target = config.limits, config.target
    features = target.feature_size if config.backend == TORCH and config.methods else 0
    numbers = limits.slots * limits.max_tree * target.vocab_size + most_rows(limits, limits.slots) * features
    return numbers * WIDTH.get(config.precision, 2)


def working_bytes(config: BundleConfig) -> int:
    """Estimated bytes that torch's programs hold while they execute: the largest step in the pool that all CUDA graphs
    share, and outside of it the largest step whose rows all have logits. 0 for TensorRT, whose engines report it."""
    if config.backend != TORCH:
        return 0
    limits, target = config.limits, config.target
    rows, width = most_rows(limits, limits.slots), WIDTH.get(config.precision, 2)
    hidden = rows * target.hidden_size * width
    attention = ATTENTION * hidden + attention_bytes(config)
    logits = (limits.slots * limits.max_tree, rows)
    return sum(max(count * target.vocab_size * width + 2 * hidden, WORKING * hidden, attention) for count in logits)


def attention_bytes(config: BundleConfig) -> int:
    """Bytes of attention's partial results in the largest step. In fp32 they grow with the context."""
    limits, target = config.limits, config.target
    return partial_bytes(
        FP32_SPLIT if config.precision == "fp32" else SPLIT,
        rows=most_rows(limits, limits.slots),
        sequences=limits.slots,
        cache_rows=max(map(config.cache_rows, range(target.num_layers))),
        heads=target.num_heads,
        kv_heads=target.num_kv_heads,
        head_size=target.head_size,
    )


def drawing_bytes(config: BundleConfig) -> int:
    """Bytes that drawing tokens from all rows of the largest decode step takes, top-k and top-p included."""
    vocabulary, rows = config.target.vocab_size, config.limits.slots * config.limits.max_tree
    return DRAW_BYTES * vocabulary * min(rows, max(AT_ONCE // vocabulary, 1))


def returned_bytes(config: BundleConfig) -> int:
    """Bytes of the logits that the host is given, where it needs those of all rows of the largest step: gathered, and
    converted to float32."""
    rows = most_rows(config.limits, config.limits.slots)
    return rows * config.target.vocab_size * (WIDTH.get(config.precision, 2) + 4)


def chain_bytes(config: BundleConfig) -> int:
    """Bytes of the raw logits float32 that drafters with chains give and take, at most: how many tokens they know is
    not recorded, so all count."""
    levels = sum(method.chain_levels for method in config.methods.values())
    return CHAIN_COPIES * 4 * config.limits.slots * levels * config.target.vocab_size


def pair_bytes(config: BundleConfig) -> int:
    """Bytes of the features that the buckets of torch's drafters with a context take."""
    if config.backend != TORCH:
        return 0
    readers = sum(method.context is not None for method in config.methods.values())
    rows = sum(bucket.rows for bucket in draft_buckets(config.limits, reads_context=True))
    return readers * rows * config.target.feature_size * WIDTH.get(config.precision, 2)


def step_bytes(config: BundleConfig) -> int:
    """Bytes of everything that a step takes, except a draft from the pairs of prompts that fit no bucket."""
    chosen = drawing_bytes(config) + returned_bytes(config)
    return output_bytes(config) + working_bytes(config) + chosen + chain_bytes(config) + pair_bytes(config)


def _with(config: BundleConfig, **limits: int) -> BundleConfig:
    """The configuration with other limits."""
    return config.model_copy(update={"limits": config.limits.model_copy(update=limits)})


def _limit_bytes(config: BundleConfig, **limits: int) -> int:
    """Bytes of caches and steps with other limits."""
    config = _with(config, **limits)
    return cache_bytes(config) + step_bytes(config)


def of_rank(config: BundleConfig, rank: int) -> BundleConfig:
    """A rank's share as a configuration: its shard is the target. Rank 0 has the drafters and all columns of logits."""
    if not config.shards:
        return config
    shard = dict(config.shards[rank])
    if rank == 0:
        shard["vocab_size"] = config.target.vocab_size
    target = config.target.model_copy(update=shard)
    return config.model_copy(update={"target": target, "methods": config.methods if rank == 0 else {}})


def loaded_bytes(bundle: Bundle, rank: int, suffix: str) -> int:
    """Bytes of the files with this suffix that a rank loads: its part of the target, and on rank 0 the drafters. What
    has no file is in memory already."""
    files = [target_folder(bundle.path, rank, bundle.config.tensor_parallel) / f"target{suffix}"]
    drafters = [*bundle.path.glob(f"*.*{suffix}")] if rank == 0 else []
    return sum(file.stat().st_size for file in files + drafters if file.exists())


def what_fits(config: BundleConfig, weight_bytes: int, free: int, copies: int = 1) -> str:
    """Say how much of `free` bytes is needed, and which smaller limits would fit."""
    limits = config.limits
    weights, steps, caches = copies * weight_bytes, step_bytes(config), cache_bytes(config)
    needed = (
        f"about {_gb(weights + steps + caches)} GB are needed (weights {_gb(weights)}, caches {_gb(caches)}, "
        f"steps {_gb(steps)}), {_gb(free)} GB are free"
    )
    room = free - weights
    slots = next((slots for slots in range(limits.slots, 0, -1) if _limit_bytes(config, slots=slots) <= room), 0)
    lengths = range(limits.max_len + 1)
    most = bisect_right(lengths, room, key=lambda length: _limit_bytes(config, max_len=length)) - 1
    length = next((length for length in range(most, 1, -1) if not unaligned_caches(config, length)), 0)
    fitting = [f"--slots {slots}"] * (0 < slots < limits.slots) + [f"--max-len {length}"] * (
        1 < length < limits.max_len
    )
    if fitting:
        return f"{needed}; {' or '.join(fitting)} would fit"
    if room <= step_bytes(_with(config, max_len=0)):
        return f"{needed}; no limits would fit beside the weights: take a GPU with more memory, or a smaller target"
    return (
        f"{needed}; another process may hold the rest (nvidia-smi), or build with fewer --slots or a smaller --max-tree"
    )


def require_room(bundle: Bundle, rank: int, suffix: str, free: int) -> None:
    """Raise BundleError where the weights, caches and outputs of a rank do not fit into the `free` bytes of its GPU,
    before anything is loaded."""
    config, weights = of_rank(bundle.config, rank), loaded_bytes(bundle, rank, suffix)
    if weights + cache_bytes(config) + output_bytes(config) > free:
        raise _too_large(bundle, config, weights, free)


@contextmanager
def within(bundle: Bundle, rank: int, suffix: str, free: int) -> Iterator[None]:
    """Turn running out of GPU memory into a BundleError that says what would fit. `free` bytes were free before the
    rank's files with this suffix were loaded."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error)):
            raise
        weights = loaded_bytes(bundle, rank, suffix)
        raise _too_large(bundle, of_rank(bundle.config, rank), weights, free) from None


def _too_large(bundle: Bundle, config: BundleConfig, weight_bytes: int, free: int) -> BundleError:
    return BundleError(f"{bundle.path} does not fit this GPU: {what_fits(config, weight_bytes, free)}")


def is_out_of_memory(error: Exception) -> bool:
    """Whether Python, numpy, torch or a library in C++ found no memory, of the host or of a GPU.

    Their texts are all there is: a C++ exception arrives as a RuntimeError, whatever it was.
    """
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(
        sign in said for sign in ("can't allocate memory", "bad_alloc", "bad allocation", "out of memory")
    )


def needed_to_build(weight_bytes: int, backend: Backend, precision: Precision) -> int:
    """Bytes of the machine's memory that a build needs."""
    return int(backend.copies_to_build(precision) * weight_bytes)


def what_builds(weight_bytes: int, backend: Backend, precision: Precision) -> str:
    """Say how much of this machine's memory a build needs, and which target would fit. Limits do not count: caches are
    allocated when a bundle is loaded."""
    free, copies = host_bytes(), backend.copies_to_build(precision)
    return (
        f"about {_gb(copies * weight_bytes)} GB are needed ({copies} times the weights of {_gb(weight_bytes)} GB), "
        f"{_gb(free)} GB are free; a target with weights of {_gb(free // copies)} GB would fit: choose one, end other "
        "programs, or build on a machine with more memory"
    )


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f}"
