"""Builds ragged batches for TreeAttention and runs kernel and reference on copies of the same caches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.speed import kernel_calls
from redraft.plugins.operators.linear.pack import bf16_bits, from_bf16_bits
from redraft.plugins.operators.tree_attention.reference import rope_table, tree_attention


@dataclass
class Sequence:
    slot: int
    length: int
    parents: list[int] | int
    """A tree's parents (-1: the root), or the number of rows of a causal chunk."""
    commits: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return self.parents if isinstance(self.parents, int) else len(self.parents)

    def ancestors(self, row: int) -> list[int]:
        if isinstance(self.parents, int):
            return list(range(row + 1))
        path = [row]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]


@dataclass
class Case:
    arrays: dict[str, np.ndarray]
    num_heads: int
    window: int = 0
    norms: tuple[np.ndarray, np.ndarray] | None = None

    def run(self, padding: int = 0) -> np.ndarray:
        arrays = dict(self.arrays)
        for name in ("qkv", "positions", "tree_mask"):
            pad = [(0, padding)] + [(0, 0)] * (arrays[name].ndim - 1)
            arrays[name] = np.pad(arrays[name], pad)
        options = {"num_heads": self.num_heads, "window": self.window, "norms": self.norms}
        return kernel_calls.tree_attention(*arrays.values(), **options)

    def reference(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Output and the updated caches (float32)."""
        bf16 = self.arrays["k_cache"].dtype == np.uint16
        tensors = {}
        for name, array in self.arrays.items():
            if name in ("k_cache", "v_cache"):
                values = torch.from_numpy(from_bf16_bits(array) if bf16 else array.copy())
                tensors[name] = values.to(torch.bfloat16 if bf16 else torch.float32)
            else:
                tensors[name] = torch.from_numpy(array)
        _, kv_heads, _, head_size = self.arrays["k_cache"].shape
        norms = self.norms and tuple(torch.from_numpy(norm) for norm in self.norms)
        sizes = {"num_heads": self.num_heads, "num_kv_heads": kv_heads, "head_size": head_size}
        out = tree_attention(*tensors.values(), **sizes, window=self.window, norms=norms)
        return out.numpy(), tensors["k_cache"].float().numpy(), tensors["v_cache"].float().numpy()

    def in_rings(self, sequences: list[Sequence], rows: int) -> Case:
        """The same case with rings of this many rows: place p has row p % rows, which a later one may have overwritten.
        Rows that no place has taken hold large numbers."""
        changed, large = dict(self.arrays), {np.float32: 99.0, np.uint16: 0x42C6}
        for name in ("k_cache", "v_cache"):
            whole = self.arrays[name]
            changed[name] = np.full((*whole.shape[:2], rows, whole.shape[3]), large[whole.dtype.type], whole.dtype)
            for s in sequences:
                for place in range(s.length - len(s.commits) + max(s.commits, default=-1) + 1):
                    changed[name][s.slot, :, place % rows] = whole[s.slot, :, place]
        return replace(self, arrays=changed)


TREE = [-1, 0, 0, 1, 1, 2, 3, 5]
MIXED = [
    Sequence(slot=3, length=70, parents=TREE, commits=(0, 2, 5)),
    Sequence(slot=0, length=0, parents=41),
    Sequence(slot=1, length=33, parents=1, commits=(0,)),
    Sequence(slot=4, length=5, parents=[-1, 0, 1]),
    Sequence(slot=2, length=257, parents=[-1, *([0] * 20), *range(1, 20)], commits=(1, 2, 7, 8)),
]
"""A tree with commits, a prefill chunk, a single row and trees behind short and long contexts."""
LAPS = [*MIXED, Sequence(slot=5, length=190, parents=TREE, commits=(0, 2, 5))]
"""Sequences within rings of 64 or 96 rows and beyond, whose paths and trees lie across where these end."""
TIGHT = [(25, 64), (57, 96), (1, 64)]
"""Windows with rings that hold them and the 40 rows of a tree, the first two exactly."""


def make_case(
    rng: np.random.Generator,
    sequences: list[Sequence],
    *,
    dtype: str = "fp32",
    heads: int = 9,
    kv_heads: int = 3,
    head_size: int = 64,
    cache_rows: int = 0,
    slots: int = 0,
    qkv: np.ndarray | None = None,
    caches: tuple[np.ndarray, np.ndarray] | None = None,
) -> Case:
    rows = sum(s.rows for s in sequences)
    slots = slots or 1 + max(s.slot for s in sequences)
    cache_rows = cache_rows or max(s.length + max(s.rows, *s.commits, 0) for s in sequences) + 3
    words = max(1, (max([len(s.parents) for s in sequences if not isinstance(s.parents, int)], default=1) + 31) // 32)
    mask = np.zeros((rows, words), np.uint32)
    positions, row = np.zeros(rows, np.int32), 0
    for s in sequences:
        for i in range(s.rows):
            path = s.ancestors(i)
            positions[row] = s.length + len(path) - 1
            if not isinstance(s.parents, int):
                for j in path:
                    mask[row, j // 32] |= np.uint32(1 << (j % 32))
            row += 1
    if caches is None:
        shape = (slots, kv_heads, cache_rows, head_size)
        values = [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]
        caches = (bf16_bits(values[0]), bf16_bits(values[1])) if dtype == "bf16" else (values[0], values[1])
    if qkv is None:
        qkv = rng.standard_normal((rows, (heads + 2 * kv_heads) * head_size)).astype(np.float32)
    arrays = {
        "qkv": qkv,
        "positions": positions,
        "row_offsets": np.cumsum([0, *(s.rows for s in sequences)], dtype=np.int32),
        "slots": np.array([s.slot for s in sequences], np.int32),
        "cache_lengths": np.array([s.length for s in sequences], np.int32),
        "tree_mask": mask.view(np.int32),
        "commit_src": np.array([c for s in sequences for c in s.commits], np.int32),
        "commit_offsets": np.cumsum([0, *(len(s.commits) for s in sequences)], dtype=np.int32),
        "rope_table": rope_table(max(64, int(positions.max()) + 1), head_size).numpy(),
        "k_cache": caches[0],
        "v_cache": caches[1],
    }
    return Case(arrays, heads)


def make_levels(rng: np.random.Generator, words: int, dtype: str = "fp32") -> Case:
    """Rows of a later level (`starts`): they stand behind 3 rows that earlier calls wrote. Without mask words they are
    causal."""
    case = make_case(rng, [Sequence(slot=0, length=40, parents=5), Sequence(slot=1, length=7, parents=5)], dtype=dtype)
    arrays = case.arrays
    arrays["cache_lengths"] = arrays["cache_lengths"] - np.int32(3)
    arrays["starts"] = arrays["cache_lengths"] + np.int32(3)
    arrays["tree_mask"] = np.zeros((10, words), np.int32)
    if words:
        arrays["tree_mask"][:5, 0] = [0b1, 0b10, 0b101, 0b110001, 0b1000110]
    arrays["commit_src"] = arrays["commit_offsets"] = np.zeros(0, np.int32)
    return case
