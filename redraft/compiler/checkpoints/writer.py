"""Safetensors files that are written as their tensors arrive, so that no tensor is held whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from redraft.model_defs.files import INDEX, SINGLE

SHARD_BYTES = 4_000_000_000
"""A file of weights is closed before it grows beyond this, unless one tensor does."""


def write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    chunks: Callable[[str], Iterable[Tensor]],
    written: Callable[[int], None] = lambda count: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors as bfloat16 to `model.safetensors`, or to shards with an index where one file would be too large.

    `chunks(name)` gives a tensor's rows in order. `written` is called with the bytes of each chunk. Every file has its
    final size in its header: one that was cut short is refused by readers. A single file is byte for byte what
    `safetensors.torch.save_file` writes. Raises OSError, or ValueError for a tensor
    whose chunks do not add up to its shape.
    """
    shards = list(_split(dict(sorted(shapes.items())), shard_bytes))
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, chunks, written)
    if count > 1:
        total = sum(_bytes(shape) for shape in shapes.values())
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * torch.bfloat16.itemsize


def _split(shapes: Mapping[str, tuple[int, ...]], most: int) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    filled = 0
    for name, shape in shapes.items():
        if shard and filled + _bytes(shape) > most:
            yield shard
            shard, filled = {}, 0
        shard[name] = shape
        filled += _bytes(shape)
    yield shard


def _write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    chunks: Callable[[str], Iterable[Tensor]],
    written: Callable[[int], None],
) -> None:
    """One file: the header's length, the header (JSON padded to 8 bytes), the tensors one after another."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _bytes(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            begun = file.tell()
            for chunk in chunks(name):
                data = chunk.to(torch.bfloat16).contiguous().view(-1).view(torch.uint8).numpy()
                file.write(data.data)
                written(data.nbytes)
            if (size := file.tell() - begun) != _bytes(shape):
                raise ValueError(f"{name}: {size} bytes were read, expected {_bytes(shape)}")
