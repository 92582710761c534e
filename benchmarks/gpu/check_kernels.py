"""The CUDA kernels compared with their references, and times of tree attention: what `benchmarks.gpu.kernels` runs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redraft.plugins.operators.tree_attention import cuda, reference

BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCES = {BF16: (0.03, 3e-3), FP32: (1e-4, 1e-5)}
"""Largest and root-mean-square error, of outputs of size 1; in bf16 queries, weights and results are rounded."""
ROUNDING = {BF16: 2**-7, FP32: 1e-5}
"""Largest relative error of a cached key."""
CACHED_BYTES = 256 << 20
"""More than any GPU's L2 cache: as many layers are timed in turn."""


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    head_size: int


SHAPES = {
    "SmolLM2-135M": Heads(9, 3, 64),
    "Phi-3-mini": Heads(32, 32, 96),
    "Gemma-3-4B": Heads(8, 4, 256),
    "Llama-2-7B": Heads(32, 32, 128),
    "Llama-3-8B": Heads(32, 8, 128),
}


PADDING, EARLIER = 5, 3
"""Numbers of rows after the last sequence's, and of uncommitted rows before a later level's."""
NORM_EPS = 1e-6
WINDOW, RING = 65, 320
"""A window, and the fewest rows of its ring on a GPU."""


class Batch(NamedTuple):
    """A layer's arguments, in `tree_attention`'s order."""

    qkv: Tensor
    positions: Tensor
    row_offsets: Tensor
    slots: Tensor
    cache_lengths: Tensor
    tree_mask: Tensor
    commit_src: Tensor
    commit_offsets: Tensor
    rope_table: Tensor
    k_cache: Tensor
    v_cache: Tensor
    starts: Tensor | None = None
    window: int = 0
    norms: tuple[Tensor, Tensor] | None = None

    def to(self, device: str) -> Batch:
        given: dict[str, Any] = self._asdict()
        given |= {name: x.to(device, copy=True) for name, x in given.items() if isinstance(x, Tensor)}
        return Batch(**given | {"norms": self.norms and tuple(norm.to(device) for norm in self.norms)})

    def options(self, heads: Heads) -> dict[str, Any]:
        """What is not positional."""
        sizes = {"num_heads": heads.heads, "num_kv_heads": heads.kv_heads, "head_size": heads.head_size}
        return sizes | {"window": self.window, "norms": self.norms, "norm_eps": NORM_EPS}


def make_batch(
    heads: Heads, lengths: list[int], rows: list[int], chunk: int = 0, seed: int = 0, dtype: torch.dtype = BF16
) -> Batch:
    """Sequences with trees of rows[b] random nodes after lengths[b] cached rows, of which up to 4 are committed first;
    with `chunk`, one more sequence that starts with a causal chunk of so many rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths, rows = [*lengths, *([0] if chunk else [])], [*rows, *([chunk] if chunk else [])]
    total, words, most = sum(rows), -(-max(rows) // 32), max(lengths) + max(*rows, 8) + 1
    masks = torch.zeros(total, words, dtype=torch.int64)
    depths: list[int] = []
    commits: list[list[int]] = []
    first = 0
    for b, (length, count) in enumerate(zip(lengths, rows, strict=True)):
        if chunk and b == len(rows) - 1:
            depths += range(count)
            commits.append([])
            continue
        depth: list[int] = []
        for i in range(count):
            parent = int(torch.randint(i, (), generator=generator)) if i else -1
            depth.append(depth[parent] + 1 if i else 0)
            if i:
                masks[first + i] = masks[first + parent]
            masks[first + i, i // 32] |= 1 << i % 32
        depths += depth
        chosen = torch.randperm(8, generator=generator)[: min(4, length)].sort().values
        commits.append(chosen.tolist())
        first += count
    counts = [len(chosen) for chosen in commits]
    cache = (len(rows), heads.kv_heads, most, heads.head_size)
    starts = [length for length, count in zip(lengths, rows, strict=True) for _ in range(count)]
    return Batch(
        torch.randn(total, (heads.heads + 2 * heads.kv_heads) * heads.head_size, generator=generator).to(dtype),
        _ints(depths) + _ints(starts),
        _ints([0, *rows]).cumsum(0).int(),
        torch.randperm(len(rows), generator=generator).int(),
        _ints(lengths),
        torch.where(masks >= 1 << 31, masks - (1 << 32), masks).int(),
        _ints([row for chosen in commits for row in chosen]),
        _ints([0, *counts]).cumsum(0).int(),
        reference.rope_table(most, heads.head_size),
        torch.randn(cache, generator=generator).to(dtype),
        torch.randn(cache, generator=generator).to(dtype),
    )


def padded(batch: Batch) -> Batch:
    """The step with rows after the last sequence's, which must come out as zeros."""
    qkv, positions, tree_mask = (
        torch.cat([own, torch.zeros_like(own[:PADDING])]) for own in (batch.qkv, batch.positions, batch.tree_mask)
    )
    return batch._replace(qkv=qkv, positions=positions, tree_mask=tree_mask)


def later_level(batch: Batch) -> Batch:
    """The rows of a drafter's later level, which committed nothing: before them stand `EARLIER` rows that are not
    committed, of which each sees the first and the last. For trees of one mask word, less those."""
    return without_commits(batch)._replace(
        starts=batch.cache_lengths,
        cache_lengths=batch.cache_lengths - EARLIER,
        tree_mask=batch.tree_mask << EARLIER | 1 << EARLIER - 1 | 1,
    )


def in_rings(batch: Batch) -> Batch:
    """The batch with a window, whose caches are rings: of what is cached, a later place has overwritten an earlier."""
    rings = []
    for whole in (batch.k_cache, batch.v_cache):
        rings.append(whole.new_zeros(*whole.shape[:2], RING, whole.shape[3]))
        for slot, length in zip(batch.slots.tolist(), batch.cache_lengths.tolist(), strict=True):
            for part in whole[slot, :, : length + 8].split(RING, dim=1):
                rings[-1][slot, :, : part.shape[1]] = part
    return batch._replace(k_cache=rings[0], v_cache=rings[1], window=WINDOW)


def with_norms(batch: Batch) -> Batch:
    """The batch with norms of query and key heads, whose projections are three times as large."""
    _, kv_heads, _, size = batch.k_cache.shape
    generator = torch.Generator().manual_seed(1)
    query, key = 1 + torch.randn(2, size, generator=generator) / 4
    scaled = batch.qkv.clone()
    scaled[:, : -kv_heads * size] *= 3
    return batch._replace(qkv=scaled, norms=(query, key))


def without_commits(batch: Batch) -> Batch:
    """The batch with neither rows nor offsets of commits."""
    return batch._replace(commit_src=_ints([]), commit_offsets=_ints([]))


def causal(batch: Batch) -> Batch:
    """Chains, as a drafter ingests them: no mask word, no commits."""
    return without_commits(batch)._replace(tree_mask=batch.tree_mask[:, :0].contiguous())


def attend(batch: Batch, heads: Heads) -> Tensor:
    return cuda.tree_attention(*batch[:-2], **batch.options(heads))


def check(batch: Batch, heads: Heads, device: str) -> dict[str, float]:
    """Largest and root-mean-square error of the output. Raises ArithmeticError beyond the tolerance, where the caches
    differ by more than a rounding or, in fp32, where a sequence on its own has other bits."""
    expected_batch, found_batch = batch.to("cpu"), batch.to(device)
    widened = expected_batch._replace(qkv=batch.qkv.float())
    expected = reference.tree_attention(*widened[:-2], **widened.options(heads))
    out, dtype = attend(found_batch, heads), batch.qkv.dtype
    if out[int(batch.row_offsets[-1]) :].any():
        raise ArithmeticError("padding rows have an output that is not zero")
    error = (out.cpu().float() - expected).abs()
    result = {"max_error": error.max().item(), "rms_error": error.square().mean().sqrt().item()}
    most, most_rms = TOLERANCES[dtype]
    if not (result["max_error"] < most and result["rms_error"] < most_rms):
        raise ArithmeticError(f"output differs from the reference: {result}")
    for name in ("k_cache", "v_cache"):
        actual, wanted = getattr(found_batch, name).cpu().float(), getattr(expected_batch, name).float()
        if not torch.allclose(actual, wanted, atol=1e-6, rtol=ROUNDING[dtype]):
            raise ArithmeticError(f"{name} differs from the reference by {(actual - wanted).abs().max().item()}")
    for b in range(len(batch.slots) if dtype == FP32 else 0):
        rows = slice(int(batch.row_offsets[b]), int(batch.row_offsets[b + 1]))
        if not torch.equal(attend(alone(batch, b).to(device), heads), out[rows]):
            raise ArithmeticError(f"sequence {b} alone has other bits than in the batch")
    return result


def alone(batch: Batch, b: int) -> Batch:
    """Sequence b of a batch."""
    rows = slice(int(batch.row_offsets[b]), int(batch.row_offsets[b + 1]))
    if len(batch.commit_offsets):
        commits = slice(int(batch.commit_offsets[b]), int(batch.commit_offsets[b + 1]))
        chosen = batch.commit_src[commits]
        batch = batch._replace(commit_src=chosen, commit_offsets=_ints([0, len(chosen)]))
    return batch._replace(
        qkv=batch.qkv[rows],
        positions=batch.positions[rows],
        row_offsets=_ints([0, rows.stop - rows.start]),
        slots=batch.slots[b : b + 1],
        cache_lengths=batch.cache_lengths[b : b + 1],
        tree_mask=batch.tree_mask[rows],
        starts=None if batch.starts is None else batch.starts[b : b + 1],
    )


def seconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call, captured in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def add_bandwidth() -> float:
    """Bytes per second that `torch.add` reads and writes: nearly the chip's own limit, which `copy_` of bytes is far
    from."""
    source = torch.empty(1 << 28, device="cuda")
    result = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: torch.add(source, 1, out=result))


def attended_bytes(batch: Batch, heads: Heads) -> int:
    """Keys and values that the sequences attend to: what must be read at least."""
    rows = int((batch.cache_lengths + batch.row_offsets.diff()).sum())
    return 2 * batch.k_cache.element_size() * rows * heads.kv_heads * heads.head_size


def measure(heads: Heads, sequences: int, length: int, rows: int, dtype: torch.dtype = BF16) -> dict[str, float]:
    """A layer's time in microseconds, and the bandwidth at which it reads its keys and values."""
    batch = make_batch(heads, [length] * sequences, [rows] * sequences, dtype=dtype)
    size = attended_bytes(batch, heads)
    layers = [batch.to("cuda") for _ in range(max(1, min(64, CACHED_BYTES // size)))]
    each = seconds(lambda: [attend(layer, heads) for layer in layers]) / len(layers)
    return {"microseconds": each * 1e6, "gigabytes_per_second": size / each / 1e9}


CASES: dict[str, tuple[list[int], list[int], int, Callable[[Batch], Batch]]] = {
    "padded": ([1000, 17, 4000], [20, 1, 33], 300, padded),
    "large-tree": ([1], [64], 0, Batch._replace),
    "trees": ([129] * 9, [16] * 9, 0, Batch._replace),
    "later-level": ([700, 40], [20, 5], 0, later_level),
    "chains": ([700, 40], [20, 5], 0, causal),
    "rings": ([2600, 312], [33, 5], 200, in_rings),
    "norms": ([700, 40], [20, 5], 90, with_norms),
}
"""By kind: cached rows, tree nodes, rows of a causal chunk, and how the batch differs. `padded` has trees and a
prompt's chunk before padding rows, `large-tree` a tree after one cached row, `trees` equal trees, `later-level` a
drafter's second level, `chains` no mask, `rings` a window and `norms` norms of the heads."""


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check_attention(
    device: str, small: bool, shapes: Sequence[str] = tuple(SHAPES), kinds: Sequence[str] = tuple(CASES)
) -> list[dict[str, Any]]:
    """Batches of these kinds under these shapes, in both precisions. Raises the errors of `check`."""
    scale, checks = 8 if small else 1, []
    for name in shapes:
        heads = SHAPES[name]
        if small:
            heads = Heads(heads.heads // heads.kv_heads * 2, 2, heads.head_size)
        for kind in kinds:
            full_lengths, full_rows, full_chunk, change = CASES[kind]
            lengths, trees = [-(-n // scale) for n in full_lengths], [-(-n // scale) for n in full_rows]
            chunk = full_chunk // scale
            for precision, dtype in (("bf16", BF16), ("fp32", FP32)):
                errors = check(change(make_batch(heads, lengths, trees, chunk, dtype=dtype)), heads, device)
                case = {"shape": name, "precision": precision, "batch": kind, "lengths": lengths, "rows": trees}
                checks.append({**case, "chunk": chunk, **errors})
                print(f"{case}: ok, {errors}", flush=True)
    return checks


def time_all(peak: float, shapes: Sequence[str] = tuple(SHAPES)) -> list[dict[str, Any]]:
    """Times of many batches in bf16; `peak` in bytes per second is printed beside them."""
    timings = []
    for name in shapes:
        heads = SHAPES[name]
        for sequences, length, rows in itertools.product((1, 8, 32), (512, 4096, 16384), (1, 16, 64)):
            if 4 * sequences * length * heads.kv_heads * heads.head_size >= 2 << 30:
                continue
            times = measure(heads, sequences, length, rows)
            case = {"shape": name, "sequences": sequences, "length": length, "rows": rows}
            timings.append({**case, **times})
            share = times["gigabytes_per_second"] * 1e9 / peak
            print(f"{case} {times['microseconds']:.1f} us, {share:.0%} of torch.add's bandwidth", flush=True)
    return timings
