"""What a bundle takes of a GPU's memory, and what would fit where it is too much."""

from __future__ import annotations

from redraft.bundle import BundleConfig, ContextInfo, TargetInfo

WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 2}
"""Bytes of a cached number."""
COPIES_WHILE_BUILDING = 2
"""Of the weights: TensorRT holds the network and the engine."""


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


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f}"
