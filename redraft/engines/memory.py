"""What a bundle takes of a GPU's memory, and what would fit where it is too much."""

from __future__ import annotations

import resource

import psutil

from redraft.bundle import BundleConfig, ContextInfo, TargetInfo

WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 2}
"""Bytes of a cached number."""
COPIES_WHILE_BUILDING = 2
"""Of the weights: TensorRT holds the network and the engine."""
COPIES_ON_THE_HOST = 8
"""Of a target's weights in a 16-bit file, while a bundle is built: as loaded (in float32), exported and compiled. So
many for `torch` with SmolLM2, 6 for `openvino`."""


def row_bytes(config: BundleConfig) -> int:
    """Of a token's keys and values, the drafters' included."""
    width = WIDTH.get(config.precision, 2)

    def row(info: TargetInfo | ContextInfo, layers: int) -> int:
        return 2 * layers * info.num_kv_heads * info.head_size * width

    contexts = [method.context for method in config.methods.values() if method.context]
    return row(config.target, config.target.num_layers) + sum(row(context, context.layers) for context in contexts)


def cache_bytes(config: BundleConfig) -> int:
    """Of all caches."""
    limits = config.limits
    return limits.slots * (limits.max_len + limits.max_tree) * row_bytes(config)


def output_bytes(config: BundleConfig) -> int:
    """Of the largest step's logits."""
    return config.limits.slots * config.limits.max_tree * config.target.vocab_size * WIDTH.get(config.precision, 2)


def what_fits(config: BundleConfig, weight_bytes: int, free: int, copies: int = 1) -> str:
    """How much is needed of `free` bytes, and with which limits less would be."""
    limits, row = config.limits, row_bytes(config)
    weights, outputs, caches = copies * weight_bytes, output_bytes(config), cache_bytes(config)
    needed = (
        f"about {_gb(weights + outputs + caches)} GB are needed (weights {_gb(weights)}, caches {_gb(caches)}, "
        f"logits {_gb(outputs)}), {_gb(free)} GB are free"
    )
    room = free - weights - outputs
    slots = room // (row * (limits.max_len + limits.max_tree))
    length = room // (row * limits.slots) - limits.max_tree
    fitting = [f"--slots {slots}"] * (0 < slots < limits.slots) + [f"--max-len {length}"] * (
        1 < length < limits.max_len
    )
    if fitting:
        return f"{needed}; {' or '.join(fitting)} would fit"
    if room <= 0:
        return f"{needed}; no limits would fit beside the weights: take a GPU with more memory, or a smaller target"
    return f"{needed}; another process may hold the rest (nvidia-smi), or build with fewer --slots"


def is_out_of_memory(error: Exception) -> bool:
    """Whether Python, numpy, torch or a library in C++ found no memory, of the host or of a GPU."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(
        sign in said for sign in ("can't allocate memory", "bad_alloc", "bad allocation", "out of memory")
    )


def host_bytes() -> int:
    """What this process has of the machine's memory and could still get."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    available = psutil.virtual_memory().available + psutil.Process().memory_info().rss
    return available if limit == resource.RLIM_INFINITY else min(available, limit)


def what_builds(weight_bytes: int, copies: int = COPIES_ON_THE_HOST) -> str:
    """How much of this machine's memory a build needs, and which target would need less. Limits do not count: nobody
    allocates caches before a bundle is loaded."""
    free = host_bytes()
    return (
        f"about {_gb(copies * weight_bytes)} GB are needed ({copies} times the weights of {_gb(weight_bytes)} GB), "
        f"{_gb(free)} GB are free; a target with weights of {_gb(free // copies)} GB would fit: choose one, end other "
        "programs, or build on a machine with more memory"
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f}"
