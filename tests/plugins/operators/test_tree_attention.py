import copy
from dataclasses import replace

import numpy as np
import pytest

from redraft.plugins import kernels
from redraft.plugins.operators.linear.pack import bf16_bits, from_bf16_bits
from tests.plugins.attention_case import LAPS, MIXED, TIGHT, TREE, Sequence, make_case


def tolerance(isa: str, dtype: str) -> float:
    """Of values of size 1. AMX multiplies with weights in bf16."""
    return 1e-5 if dtype == "fp32" else 5e-3 if isa == "amx" else 5e-4


def as_float(cache: np.ndarray) -> np.ndarray:
    return from_bf16_bits(cache) if cache.dtype == np.uint16 else cache


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 2, 96), (7, 1, 32), (33, 1, 32)]
)
def test_mixed_batch_equals_reference(isa, rng, dtype, heads, kv_heads, head_size):
    case = make_case(rng, MIXED, dtype=dtype, heads=heads, kv_heads=kv_heads, head_size=head_size)
    expected, k, v = case.reference()
    out = case.run(padding=3)
    np.testing.assert_allclose(out[:-3], expected, atol=tolerance(isa, dtype))
    assert not out[-3:].any()
    np.testing.assert_allclose(as_float(case.arrays["k_cache"]), k, atol=1e-6 if dtype == "fp32" else 4e-2)
    np.testing.assert_array_equal(as_float(case.arrays["v_cache"]), v)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("window", [1, 3, 40, 300])
def test_windows_count_the_rows_of_a_path(isa, rng, dtype, window):
    """Windows that end in the tree, in the context, and before it; with norms of the heads."""
    case = make_case(rng, MIXED, dtype=dtype)
    case.window = window
    case.norms = tuple((1 + rng.standard_normal(64) / 4).astype(np.float32) for _ in "qk")
    expected, k, _ = case.reference()
    np.testing.assert_allclose(case.run(), expected, atol=4 * tolerance(isa, dtype))
    np.testing.assert_allclose(as_float(case.arrays["k_cache"]), k, atol=1e-5 if dtype == "fp32" else 8e-2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("window", [2, 33, 131])
def test_a_windowed_tree_row_equals_the_same_token_decoded_alone(isa, rng, dtype, window):
    """Bit for bit, across the window's edge."""
    tree = Sequence(slot=0, length=130, parents=TREE)
    case = make_case(rng, [tree], dtype=dtype, cache_rows=150)
    chain = case.arrays["k_cache"].copy(), case.arrays["v_cache"].copy()
    case.window = window
    out = case.run()
    for depth, row in enumerate(tree.ancestors(7)):
        rows = [Sequence(slot=0, length=130 + depth, parents=1)]
        alone = make_case(rng, rows, qkv=case.arrays["qkv"][row : row + 1], caches=chain)
        alone.window = window
        np.testing.assert_array_equal(alone.run()[0], out[row])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("window", "rows"), TIGHT)
def test_a_ring_gives_the_bits_of_a_whole_cache(isa, rng, dtype, window, rows):
    whole = make_case(rng, LAPS, dtype=dtype)
    whole.window = window
    ring = whole.in_rings(LAPS, rows)
    expected, *_ = replace(ring, arrays=copy.deepcopy(ring.arrays)).reference()
    out = ring.run()
    np.testing.assert_allclose(out, expected, atol=tolerance(isa, dtype))
    np.testing.assert_array_equal(out, whole.run())
    for s in LAPS:
        places = np.arange(s.length - len(s.commits), s.length + s.rows)
        for name in ("k_cache", "v_cache"):
            found, want = (case.arrays[name][s.slot] for case in (ring, whole))
            np.testing.assert_array_equal(found[:, places % rows], want[:, places])


def test_a_ring_that_lacks_rows_of_a_window_is_refused(rng):
    whole = make_case(rng, LAPS)
    for window, rows, message in (
        (26, 64, "cache length and rows 297: expected at most"),
        (0, 64, "cache length and rows 78: expected at most"),
        (1, 70, "cache rows 70: expected a multiple of 32 in a ring"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(whole.in_rings(LAPS, rows), window=window).run()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_sequence_sees_what_another_of_its_slot_writes(isa, rng, dtype):
    """Whichever comes first: as in two calls, bit for bit."""
    reader, writer = Sequence(slot=0, length=70, parents=TREE), Sequence(slot=0, length=50, parents=20)
    case = make_case(rng, [reader, writer], dtype=dtype)
    expected, *_ = case.reference()
    caches = case.arrays["k_cache"].copy(), case.arrays["v_cache"].copy()
    out = case.run()
    np.testing.assert_allclose(out, expected, atol=tolerance(isa, dtype))
    rows = len(TREE)
    for sequence, qkv, found in (
        (writer, case.arrays["qkv"][rows:], out[rows:]),
        (reader, case.arrays["qkv"][:rows], out[:rows]),
    ):
        np.testing.assert_array_equal(make_case(rng, [sequence], qkv=qkv, caches=caches).run(), found)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("length", [0, 1, 31, 130, 513])
def test_tree_row_equals_the_same_token_decoded_alone(isa, rng, dtype, length):
    """Bit for bit: each root-to-node path of a tree against a chain of single-row steps."""
    parents = [-1, 0, 0, 1, 1, 2, 3, 5, 0, 8, 9, 9]
    tree = Sequence(slot=0, length=length, parents=parents)
    case = make_case(rng, [tree], dtype=dtype, cache_rows=length + 16)
    caches = case.arrays["k_cache"].copy(), case.arrays["v_cache"].copy()
    out = case.run()
    for node in (7, 6, 11, 4):
        chain = caches[0].copy(), caches[1].copy()
        for depth, row in enumerate(tree.ancestors(node)):
            alone = make_case(
                rng,
                [Sequence(slot=0, length=length + depth, parents=1)],
                qkv=case.arrays["qkv"][row : row + 1],
                caches=chain,
            )
            np.testing.assert_array_equal(alone.run()[0], out[row])


@pytest.mark.parametrize("size", [1.0, 1e-38])
def test_causal_chunk_equals_steps_of_one_row(isa, rng, size):
    """Also of values whose products are denormals."""
    chunk = make_case(rng, [Sequence(slot=0, length=9, parents=70)], dtype="bf16")
    chunk.arrays["v_cache"][:] = bf16_bits(from_bf16_bits(chunk.arrays["v_cache"]) * np.float32(size))
    chunk.arrays["qkv"][:, -3 * 64 :] *= np.float32(size)
    caches = chunk.arrays["k_cache"].copy(), chunk.arrays["v_cache"].copy()
    out = chunk.run()
    for i in range(70):
        sequence = Sequence(slot=0, length=9 + i, parents=1)
        one = make_case(rng, [sequence], qkv=chunk.arrays["qkv"][i : i + 1], caches=caches)
        np.testing.assert_array_equal(one.run()[0], out[i])


@pytest.mark.parametrize("length", [9, 31])
def test_rows_of_a_chain_by_mask_and_without_in_one_block(isa, rng, length):
    """Its last rows in a call of their own, too: they stand behind 40 others."""
    chunk = make_case(rng, [Sequence(slot=0, length=length, parents=70)], dtype="bf16")
    caches = chunk.arrays["k_cache"].copy(), chunk.arrays["v_cache"].copy()
    expected = chunk.run()
    for first, count in ((0, 40), (40, 30)):
        rows, chain = slice(first, first + count), [Sequence(slot=0, length=length, parents=count)]
        part = make_case(rng, chain, qkv=chunk.arrays["qkv"][rows], caches=caches)
        mask = np.tri(count, 96, first, np.uint8)
        mask[::2] = 0
        part.arrays |= {
            "positions": chunk.arrays["positions"][rows],
            "tree_mask": np.packbits(mask, axis=1, bitorder="little").view(np.int32),
            "rope_table": chunk.arrays["rope_table"],
            "starts": np.array([length + first], np.int32),
        }
        np.testing.assert_array_equal(part.run(), expected[rows])


def test_equal_values_stay_as_they_are(isa, rng):
    """However weights are rounded, their sum is what is divided by."""
    case = make_case(rng, [Sequence(slot=0, length=300, parents=5)], dtype="bf16")
    case.arrays["v_cache"][:] = bf16_bits(np.ones((1, 1), np.float32))
    case.arrays["qkv"][:, -3 * 64 :] = 1
    np.testing.assert_allclose(case.run(), 1, rtol=1e-6)


@pytest.mark.parametrize("factor", [20, 1e10])
def test_scores_of_any_size(isa, rng, factor):
    """With scores of this size a query in bf16 alone weighs other keys."""
    case = make_case(rng, MIXED, dtype="bf16")
    case.arrays["qkv"][:, : 9 * 64] *= np.float32(factor)
    expected, _, _ = case.reference()
    out = case.run()
    assert np.isfinite(out).all()
    if factor == 20:
        np.testing.assert_allclose(out, expected, atol=1e-2)


@pytest.mark.parametrize("sequences", [MIXED, [Sequence(0, 300, 1)], [Sequence(0, 300, TREE)]])
def test_threads_and_batch_do_not_matter(isa, rng, sequences):
    case = make_case(rng, sequences, dtype="bf16")
    caches = case.arrays["k_cache"].copy(), case.arrays["v_cache"].copy()
    outs = []
    try:
        for count in (1, 2, 3, 16):
            case.arrays["k_cache"][:], case.arrays["v_cache"][:] = caches
            kernels.set_threads(count)
            outs.append(case.run())
    finally:
        kernels.set_threads(2)
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
    first = 0
    for sequence in sequences:
        rows = slice(first, first := first + sequence.rows)
        single = make_case(rng, [sequence], qkv=case.arrays["qkv"][rows], caches=(caches[0].copy(), caches[1].copy()))
        np.testing.assert_array_equal(single.run(), outs[0][rows])


def test_instruction_sets_agree_bit_for_bit(rng):
    outs = []
    for name in ("avx2", "avx512"):
        try:
            kernels.select_isa(name)
        except ValueError as error:
            if "this machine lacks it" not in str(error):
                raise
            pytest.skip(str(error))
        outs.append(make_case(np.random.default_rng(1), MIXED, dtype="bf16").run())
    kernels.select_isa(None)
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("slots", 0, 9, "slot 9: expected 0 to 4"),
        ("cache_lengths", 1, 5000, "cache length and rows 5041"),
        ("positions", 0, -1, "position -1"),
        ("commit_src", 1, 0, "commit_src 0: expected ascending"),
        ("row_offsets", 5, 1000, "row_offsets 1000"),
    ],
)
def test_bad_arguments_are_named(rng, name, index, value, message):
    case = make_case(rng, MIXED)
    case.arrays[name][index] = value
    with pytest.raises(ValueError, match=message):
        case.run()


LEVELS = [([-1] * 3, 3), ([0, 2, 2], 3), ([3, 4, 4, 5], 4)]
"""Trees fed level by level: rows 0 to 2 follow the context, rows 3 to 5 follow some of them, and so on."""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_tree_fed_level_by_level_has_the_bits_of_the_whole(isa, rng, dtype):
    parents = [parent for level, _ in LEVELS for parent in level]
    trees = [Sequence(slot=1, length=40, parents=parents), Sequence(slot=0, length=7, parents=parents)]
    whole = make_case(rng, trees, dtype=dtype)
    caches = whole.arrays["k_cache"].copy(), whole.arrays["v_cache"].copy()
    expected = whole.run().reshape(2, len(parents), -1)
    begin = 0
    for _, count in LEVELS:
        rows = np.concatenate([np.arange(begin, begin + count) + b * len(parents) for b in range(2)])
        level = make_case(rng, trees, dtype=dtype, qkv=whole.arrays["qkv"][rows].copy(), caches=caches)
        for name in ("positions", "tree_mask"):
            level.arrays[name] = level.arrays[name][rows].copy()
        level.arrays["row_offsets"] = np.array([0, count, 2 * count], np.int32)
        level.arrays["commit_src"] = level.arrays["commit_offsets"] = np.zeros(0, np.int32)
        level.arrays["starts"] = level.arrays["cache_lengths"] + np.int32(begin)
        reference, _, _ = level.reference()
        found = level.run()
        np.testing.assert_array_equal(found.reshape(2, count, -1), expected[:, begin : begin + count])
        np.testing.assert_allclose(found, reference, atol=tolerance(isa, dtype))
        begin += count
    np.testing.assert_array_equal(caches[0], whole.arrays["k_cache"])


def test_a_chain_fed_row_by_row_needs_no_mask(rng):
    chunk = make_case(rng, [Sequence(slot=0, length=9, parents=5)])
    caches = chunk.arrays["k_cache"].copy(), chunk.arrays["v_cache"].copy()
    expected = chunk.run()
    for i in range(5):
        one = make_case(rng, [Sequence(slot=0, length=9, parents=1)], qkv=chunk.arrays["qkv"][i : i + 1], caches=caches)
        one.arrays["positions"] += np.int32(i)
        one.arrays |= {"tree_mask": np.zeros((0, 0), np.int32), "starts": np.array([9 + i], np.int32)}
        np.testing.assert_array_equal(one.run()[0], expected[i])
    one.arrays["starts"] = np.array([8], np.int32)
    with pytest.raises(ValueError, match="start 8: expected at least the cache length"):
        one.run()
