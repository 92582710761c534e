"""The CUDA kernels' own source, run on the CPU (plugins/cuda/host_shim.cuh) and on a GPU."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.plugins.cuda.launch import run
from redraft.plugins.operators.linear.pack import from_bf16_bits
from redraft.plugins.operators.tree_attention import cuda, cuda_kernels
from redraft.plugins.operators.tree_attention.cuda_kernels import HEAD_SIZES, SPLIT, TILE
from tests.plugins.attention_case import LAPS, MIXED, Case, Sequence, make_case, make_levels


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def in_bf16(case: Case) -> Case:
    case.arrays["qkv"] = torch.from_numpy(case.arrays["qkv"]).bfloat16().float().numpy()
    return case


def tensors(case: Case, padding: int = 0) -> dict[str, torch.Tensor]:
    """The case's arrays as the kernels take them; the caches are copies."""
    found = {name: torch.from_numpy(array.copy()) for name, array in case.arrays.items()}
    for name in ("qkv", "positions", "tree_mask"):
        found[name] = torch.cat([found[name], found[name].new_zeros(padding, *found[name].shape[1:])])
    for name in ("k_cache", "v_cache"):
        found[name] = found[name].view(torch.bfloat16)
    return found | {"qkv": found["qkv"].bfloat16()}


def attend(case: Case, arguments: dict[str, torch.Tensor], **options) -> torch.Tensor:
    _, kv_heads, _, head_size = case.arrays["k_cache"].shape
    sizes = {"num_heads": case.num_heads, "num_kv_heads": kv_heads, "head_size": head_size}
    norms = case.norms and tuple(torch.from_numpy(norm) for norm in case.norms)
    return cuda.tree_attention(**arguments, **sizes, window=case.window, norms=norms, **options)


def with_norms(case: Case, rng: np.random.Generator) -> Case:
    """The case with norms, and with queries and keys of very different sizes from row to row."""
    size = case.arrays["k_cache"].shape[3]
    weights = [(1 + rng.standard_normal(size) / 4).astype(np.float32) for _ in "qk"]
    values = case.arrays["k_cache"].shape[1] * size
    scales = 10.0 ** rng.integers(-3, 3, (len(case.arrays["qkv"]), 1))
    case.arrays["qkv"][:, :-values] *= scales.astype(np.float32)
    return replace(case, norms=(weights[0], weights[1]))


def expect_close(found: torch.Tensor, expected: np.ndarray) -> None:
    """Queries and weights are rounded to bf16, 2^-9 at most, on the way to a bf16 result."""
    error = np.abs(found.float().numpy() - expected)
    assert error.max() < 0.04
    assert np.sqrt((error**2).mean()) < 4e-3


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"),
    [(9, 3, 64), (4, 4, 64), (5, 5, 96), (8, 1, 128), (6, 2, 128), (4, 1, 256), (4, 2, 256)],
)
def test_mixed_batch_equals_reference(rng, heads, kv_heads, head_size, run_kernel):
    case = in_bf16(make_case(rng, MIXED, dtype="bf16", heads=heads, kv_heads=kv_heads, head_size=head_size))
    expected, k, v = case.reference()
    arguments = tensors(case, padding=3)
    out = attend(case, arguments, run=run_kernel)
    expect_close(out[:-3], expected)
    assert not out[-3:].any()
    np.testing.assert_allclose(arguments["k_cache"].float().numpy(), k, atol=4e-2, rtol=0)
    assert (arguments["k_cache"].float().numpy() != k).mean() < 0.01
    np.testing.assert_array_equal(arguments["v_cache"].float().numpy(), v)


@pytest.mark.parametrize(
    ("window", "head_size"),
    [(1, 64), (3, 64), (40, 64), (300, 64), (1, 128), (3, 128), (40, 128), (300, 128), (40, 96), (3, 256), (300, 256)],
)
def test_windows_count_the_rows_of_a_path(rng, window, head_size, run_kernel):
    """Windows that end in the tree, in the context, and before it."""
    case = in_bf16(make_case(rng, MIXED, dtype="bf16", heads=6, kv_heads=2, head_size=head_size))
    case.window = window
    expect_close(attend(case, tensors(case), run=run_kernel), case.reference()[0])


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(9, 3, 64), (5, 5, 96), (6, 2, 128), (4, 1, 256)])
def test_heads_are_normalized_before_they_are_turned(rng, heads, kv_heads, head_size, run_kernel):
    """Large ones, small ones beside epsilon, and weights that tell queries from keys."""
    case = with_norms(make_case(rng, MIXED, dtype="bf16", heads=heads, kv_heads=kv_heads, head_size=head_size), rng)
    case = in_bf16(case)
    expected, k, v = case.reference()
    arguments = tensors(case)
    expect_close(attend(case, arguments, run=run_kernel), expected)
    np.testing.assert_allclose(arguments["k_cache"].float().numpy(), k, atol=1e-3, rtol=2**-8)
    np.testing.assert_array_equal(arguments["v_cache"].float().numpy(), v)


@pytest.mark.parametrize(("window", "rows", "head_size"), [(25, 64, 64), (89, 128, 64), (25, 64, 256)])
def test_a_ring_gives_the_numbers_of_a_whole_cache(rng, window, rows, head_size, run_kernel):
    whole = in_bf16(make_case(rng, LAPS, dtype="bf16", heads=3, kv_heads=1, head_size=head_size))
    whole = replace(whole, window=window)
    case, (expected, _, v) = whole.in_rings(LAPS, rows), whole.reference()
    found = tensors(case)
    expect_close(attend(case, found, run=run_kernel), expected)
    for s in LAPS:
        places = np.arange(s.length - len(s.commits), s.length + s.rows)
        np.testing.assert_array_equal(found["v_cache"][s.slot][:, places % rows].float().numpy(), v[s.slot][:, places])


@pytest.mark.parametrize("head_size", [96, 128, 256])
def test_order_of_blocks_and_threads_does_not_matter(rng, head_size):
    case = in_bf16(make_case(rng, MIXED, dtype="bf16", head_size=head_size, heads=6, kv_heads=2))
    ascending, descending = tensors(case), tensors(case)
    out = attend(case, ascending)
    torch.testing.assert_close(attend(case, descending, run=partial(run, descending=True)), out, rtol=0, atol=0)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(ascending[name], descending[name], rtol=0, atol=0)


def visible_counts(sequences: list[Sequence]) -> list[int]:
    return [s.length + len(s.ancestors(row)) for s in sequences for row in range(s.rows)]


class Parts:
    """The partial results of `TreeAttentionSplit` as its plan says where they are."""

    def __init__(self, outputs: list[torch.Tensor], case: Case):
        self.partial, self.stats, plan = outputs
        self.heads, (_, self.kv_heads, _, self.size) = case.num_heads, case.arrays["k_cache"].shape
        self.first, self.count, self.begin = plan[: len(case.arrays["qkv"])].T.numpy()
        self.tile = TILE // (2 if self.size > 128 else 1)
        self.items = len(self.stats) // (self.kv_heads * self.tile)

    def places(self, row: int, head: int) -> list[int]:
        """Those of a row under a head."""
        group = self.heads // self.kv_heads
        query = (row - self.begin[row]) * group + head % group
        first = self.first[row] + query // self.tile * self.count[row]
        assert first + self.count[row] <= self.items
        items = range(first, first + self.count[row])
        return [(item * self.kv_heads + head // group) * self.tile + query % self.tile for item in items]

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums [rows, heads] and weighted values [rows, heads, D] of all parts, where all scores are the same."""
        shape = len(self.first), self.heads
        places = {(row, head): self.places(row, head) for row in range(shape[0]) for head in range(shape[1])}
        flat = [place for own in places.values() for place in own]
        assert len(flat) == len(set(flat)), "no two rows or heads share a place"
        stats = torch.stack([self.stats[own, 1].sum() for own in places.values()])
        values = [torch.where(self.stats[own, 1:] > 0, self.partial[own], 0).sum(0) for own in places.values()]
        return stats.unflatten(0, shape), torch.stack(values).unflatten(0, shape)


def check_every_visible_key_counts_once(case: Case, sequences: list[Sequence]) -> None:
    """With queries of zero every weight is 1, so sums count keys and values add up without rounding."""
    size = case.arrays["k_cache"].shape[3]
    rows, heads = len(case.arrays["qkv"]), case.num_heads
    case.arrays["qkv"] = np.round(4 * case.arrays["qkv"])
    case.arrays["qkv"][:, : heads * size] = 0
    for name in ("k_cache", "v_cache"):
        values = torch.from_numpy(np.round(4 * from_bf16_bits(case.arrays[name]))).bfloat16()
        case.arrays[name] = values.view(torch.uint16).numpy()
    arguments = tensors(case)
    captured = {}

    def capture(kernel, *rest):
        captured[kernel.name] = run(kernel, *rest)
        return captured[kernel.name]

    attend(case, arguments, run=capture)
    sums, total = Parts(captured[SPLIT.name], case).sums()
    counts = torch.tensor(visible_counts(sequences)).float()
    torch.testing.assert_close(sums, counts[:, None].expand(rows, heads), rtol=0, atol=0)
    expected = torch.from_numpy(case.reference()[0]).view(rows, heads, size) * counts[:, None, None]
    torch.testing.assert_close(total, expected.round(), rtol=0, atol=0)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_visible_key_counts_once(rng, head_size):
    case = make_case(rng, MIXED, dtype="bf16", heads=6, kv_heads=2, head_size=head_size)
    check_every_visible_key_counts_once(case, MIXED)


@st.composite
def batches(draw):
    sequences = []
    for slot in draw(st.permutations(range(3))):
        length = draw(st.integers(0, 150))
        kind = draw(st.sampled_from(["tree", "chain", "chunk"]))
        rows = draw(st.integers(1, 40))
        parents = (
            [-1, *(draw(st.integers(0, i)) for i in range(rows - 1))] if kind == "tree" else [*range(-1, rows - 1)]
        )
        commits = draw(st.lists(st.integers(0, 20), max_size=min(length, 6), unique=True).map(sorted))
        sequences.append(Sequence(slot, length, rows if kind == "chunk" else parents, tuple(commits)))
    return sequences


UNEVEN = [
    Sequence(slot=2, length=3000, parents=1),
    *(Sequence(slot=slot, length=5 * slot, parents=[-1, 0, 0]) for slot in (0, 1, 3)),
    Sequence(slot=4, length=200, parents=70),
]


MANY = [Sequence(slot=slot, length=7 * slot % 90, parents=1 + slot % 2) for slot in range(150)]
"""More than a block's threads."""


@pytest.mark.parametrize(("sequences", "blocks"), [(UNEVEN, 528), (UNEVEN, 8), (UNEVEN, 1), (MANY, 528), (MANY, 40)])
def test_a_long_sequence_is_cut_into_parts_beside_short_ones(rng, monkeypatch, sequences, blocks):
    """As many as make none longer than its share of all keys, or than 64. Items follow each other, so that blocks
    compute each part once."""
    monkeypatch.setattr(cuda_kernels, "BLOCKS", blocks)
    case = make_case(rng, sequences, dtype="bf16", heads=2, kv_heads=1)
    case.arrays["qkv"][:, : 2 * 64] = 0
    captured = {}

    def capture(kernel, *rest):
        captured[kernel.name] = run(kernel, *rest)
        return captured[kernel.name]

    expect_close(attend(in_bf16(case), tensors(case), run=capture), case.reference()[0])
    parts, begins = Parts(captured[SPLIT.name], case), case.arrays["row_offsets"]
    tiles = np.array([-(-s.rows * 2 // TILE) for s in sequences])
    keys = np.array([-(-(s.length + s.rows) // 64) for s in sequences])
    share = max(1, -(-int(tiles @ keys) // blocks))
    counts = -(-keys // share)
    np.testing.assert_array_equal(parts.count, counts.repeat(np.diff(begins)))
    np.testing.assert_array_equal(parts.begin, begins[:-1].repeat(np.diff(begins)))
    ends = np.cumsum(tiles * counts)
    np.testing.assert_array_equal(parts.first, np.array([0, *ends[:-1]]).repeat(np.diff(begins)))
    assert ends[-1] <= parts.items


@settings(max_examples=6)
@given(batches(), st.sampled_from([(9, 3, 64), (3, 3, 128), (3, 1, 256)]))
def test_random_batches(sequences, shape):
    heads, kv_heads, size = shape
    rng = np.random.default_rng(3)
    case = in_bf16(make_case(rng, sequences, dtype="bf16", heads=heads, kv_heads=kv_heads, head_size=size))
    arguments = tensors(case)
    expected, _, v = case.reference()
    expect_close(attend(case, arguments), expected)
    np.testing.assert_array_equal(arguments["v_cache"].float().numpy(), v)
    check_every_visible_key_counts_once(case, sequences)


def test_rows_over_the_committed_paths_own_places(rng):
    """A chunk of more rows than a block writes, over the places that the commit still reads."""
    sequences = [Sequence(slot=0, length=6, parents=150, commits=(0, 90, 140)), Sequence(slot=1, length=3, parents=2)]
    case = in_bf16(make_case(rng, sequences, dtype="bf16", heads=3, kv_heads=1))
    _, _, v = case.reference()
    for descending in (False, True):
        arguments = tensors(case)
        attend(case, arguments, run=partial(run, descending=descending))
        np.testing.assert_array_equal(arguments["v_cache"].float().numpy(), v)


@pytest.mark.parametrize("words", [0, 1])
def test_levels_behind_earlier_rows_and_chains_without_mask(rng, words):
    case = in_bf16(make_levels(rng, words, "bf16"))
    expected, _, _ = case.reference()
    expect_close(attend(case, tensors(case)), expected)


def test_tensors_that_do_not_fit_are_named(rng):
    case = in_bf16(make_case(rng, MIXED, dtype="bf16"))
    for name, value, message in [
        ("qkv", torch.zeros(2, 3), "qkv is torch.float32: expected contiguous bf16"),
        ("slots", torch.zeros(4, dtype=torch.int32), "cache_lengths has sequences 5: expected 4"),
        ("positions", torch.zeros(7, dtype=torch.int32), "positions has rows 7: expected 93"),
        ("k_cache", torch.zeros(4, 64).bfloat16(), "k_cache has 2 dimensions"),
        ("v_cache", torch.zeros(5, 3, 9, 32).bfloat16(), "v_cache has cache_rows 9"),
    ]:
        with pytest.raises(ValueError, match=message):
            attend(case, tensors(case) | {name: value})
    with pytest.raises(ValueError, match="KV heads of size 32: expected a multiple, of size 64, 96, 128, 256"):
        cuda.tree_attention(**tensors(case), num_heads=9, num_kv_heads=3, head_size=32)
