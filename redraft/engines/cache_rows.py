"""Copies of rows from one slot of a KV cache to another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def copy_rows(caches: Iterable[Any], source: int, target: int, rows: int) -> None:
    """Copy a slot's first rows to another slot in every cache, an array or a tensor [slots, kv_heads, rows,
    head_size]. A ring with fewer rows is copied as a whole."""
    for cache in caches:
        cache[target, :, :rows] = cache[source, :, :rows]
