"""Checks, when a bundle is loaded, of how an engine updates its caches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

SENTINEL = 3.0
"""The value of every cached number before a checked step."""
SCRATCH = 32 << 20
"""Bytes of scratch memory that a step of few rows may take besides a cache: the attention kernels' partial results, at
most 18 MB, and activations."""
COPIES = ("reformat", "copy")
"""Words in the names and types of the layers by which TensorRT moves a tensor."""


def fault(
    caches: Iterable[Tensor], step: Callable[[], object], slot: int, written: int, max_len: int, padded: int = 0
) -> str | None:
    """Describe a fault of `step`, which should write rows 0 to `written` - 1 of a slot, may write up to `padded` rows
    there, and must leave all others before `max_len` as they are; None where it has none.

    caches [slots, kv_heads, rows, head_size] are the layers' k, then their v; all are zeros afterwards. Rows from
    `max_len` on are free for sequences that are not in a step.
    """
    caches, read = list(caches), []
    for cache in caches:
        cache.fill_(SENTINEL)
    step()
    for cache in caches:
        updated = (cache[slot, :, :written] != SENTINEL).any(-1).all()
        cache[slot, :, : max(written, padded)] = SENTINEL
        read.append(torch.stack([updated, (cache[:, :, :max_len] == SENTINEL).all()]))
        cache.zero_()
    for number, (updated, kept) in enumerate(torch.stack(read).tolist()):
        name = f"{'kv'[number // (len(caches) // 2)]}_cache.{number % (len(caches) // 2)}"
        if not updated:
            return f"does not update {name} in place"
        if not kept:
            return f"changes rows of {name} that a step does not write"
    return None


def copies(trt: Any, engine: Any, names: Iterable[str], cache_bytes: int) -> str | None:
    """Describe how an engine copies a cache in every step, from its inspector and its scratch memory for the smallest
    steps; None where they show no copy. Only for engines whose kernels were selected when they were built."""
    inspector = engine.create_engine_inspector()
    described = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    cache = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    for layer in described.get("Layers", []):
        if _moves(layer) and cache.search(json.dumps(layer)):
            return f"its layer {layer if isinstance(layer, str) else layer.get('Name')} copies one"
    scratch = engine.get_device_memory_size_for_profile_v2(0)
    if scratch >= cache_bytes + SCRATCH:
        return (
            f"its smallest steps take {scratch / 1e6:.0f} MB of scratch memory, and a cache has {cache_bytes / 1e6:.0f}"
        )
    return None


def _moves(layer: str | dict[str, Any]) -> bool:
    said = layer if isinstance(layer, str) else f"{layer.get('Name')} {layer.get('LayerType')}"
    return any(word in said.lower() for word in COPIES)
