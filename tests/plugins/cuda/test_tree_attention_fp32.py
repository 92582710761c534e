"""The fp32 kernels' own source, run on the CPU: the reference's numbers, and bits that are a row's own."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from redraft.plugins.cuda.launch import run
from redraft.plugins.operators.tree_attention.cuda_kernels import FP32_SPLIT, FP32_SPLIT_KEYS
from tests.plugins.attention_case import LAPS, MIXED, TREE, Case, Sequence, make_case, make_levels
from tests.plugins.cuda.test_tree_attention import attend, batches, visible_counts, with_norms

LONG_TREE = [-1, 0, 0, 1, 1, 2, 3, 5, 0, 8, 9, 9, *([0] * 25), 11, 36, 37, 38, 39]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tensors(case: Case, padding: int = 0) -> dict[str, torch.Tensor]:
    """The case's arrays, the caches as copies."""
    found = {name: torch.from_numpy(array.copy()) for name, array in case.arrays.items()}
    for name in ("qkv", "positions", "tree_mask"):
        found[name] = torch.cat([found[name], found[name].new_zeros(padding, *found[name].shape[1:])])
    return found


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(9, 3, 64), (3, 1, 96), (5, 5, 128), (3, 1, 256)])
def test_mixed_batch_equals_reference(rng, heads, kv_heads, head_size):
    case = make_case(rng, MIXED, heads=heads, kv_heads=kv_heads, head_size=head_size)
    expected, k, v = case.reference()
    arguments = tensors(case, padding=3)
    out = attend(case, arguments)
    np.testing.assert_allclose(out[:-3], expected, atol=1e-5)
    assert not out[-3:].any()
    np.testing.assert_allclose(arguments["k_cache"], k, atol=1e-6)
    np.testing.assert_array_equal(arguments["v_cache"], v)
    again = tensors(case, padding=3)
    assert torch.equal(attend(case, again, run=partial(run, descending=True)), out)


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(6, 2, 64), (3, 1, 96), (4, 1, 256)])
def test_heads_are_normalized_before_they_are_turned(rng, heads, kv_heads, head_size):
    case = with_norms(make_case(rng, MIXED, heads=heads, kv_heads=kv_heads, head_size=head_size), rng)
    expected, k, _ = case.reference()
    arguments = tensors(case)
    np.testing.assert_allclose(attend(case, arguments), expected, atol=1e-4)
    np.testing.assert_allclose(arguments["k_cache"], k, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 40, 300])
def test_windows_count_the_rows_of_a_path(rng, window):
    """Windows that end in the tree, in the context, and before it; a split may be hidden as a whole."""
    case = make_case(rng, MIXED, heads=6, kv_heads=2)
    case.window = window
    np.testing.assert_allclose(attend(case, tensors(case)), case.reference()[0], atol=1e-5)


def test_a_ring_gives_the_bits_of_a_whole_cache(rng):
    """The smallest ring: 255 rows more than the window. It ends within a split."""
    sequences = [*LAPS, Sequence(slot=6, length=530, parents=TREE, commits=(1, 3))]
    whole = replace(make_case(rng, sequences, heads=2, kv_heads=1), window=33)
    case, found = whole.in_rings(sequences, 288), tensors(whole)
    expected, lapped = attend(whole, found), tensors(case)
    np.testing.assert_array_equal(attend(case, lapped), expected)
    for s in sequences:
        places = np.arange(s.length - len(s.commits), s.length + s.rows)
        for name in ("k_cache", "v_cache"):
            assert torch.equal(lapped[name][s.slot][:, places % 288], found[name][s.slot][:, places])


@settings(max_examples=4)
@given(batches())
def test_random_batches(sequences):
    case = make_case(np.random.default_rng(3), sequences, heads=3, kv_heads=1)
    captured = {}

    def capture(kernel, *rest):
        captured[kernel.name] = run(kernel, *rest)
        return captured[kernel.name]

    expected, _, v = case.reference()
    arguments = tensors(case)
    np.testing.assert_allclose(attend(case, arguments, run=capture), expected, atol=1e-5)
    np.testing.assert_array_equal(arguments["v_cache"], v)
    stats = captured[FP32_SPLIT.name][1].unflatten(0, (-1, sum(s.rows for s in sequences), 3))
    for row, count in enumerate(visible_counts(sequences)):
        filled = [max(0, min(FP32_SPLIT_KEYS, count - FP32_SPLIT_KEYS * part)) for part in range(len(stats))]
        assert [bool(x) for x in (stats[:, row, 0, 1] > 0).tolist()] == [bool(n) for n in filled]


@pytest.mark.parametrize("length", [0, 1, 31, 250, 513])
def test_a_tree_row_has_the_bits_of_the_same_token_decoded_alone(rng, length):
    """Whatever else is in the tree, in the batch and in the cache, and however long that is. Some paths cross a block
    of 32 keys or a part of the keys at other places than the tree's rows do."""
    tree = Sequence(slot=1, length=length, parents=LONG_TREE)
    batch = [Sequence(slot=0, length=40, parents=7), tree, Sequence(slot=2, length=3, parents=[-1, 0])]
    case = make_case(rng, batch, head_size=128, heads=2, kv_heads=1, cache_rows=900)
    out = attend(case, tensors(case))[7 : 7 + len(LONG_TREE)]
    for node in (41, 7, 11):
        chain = [np.zeros((1, 1, length + 20, 128), np.float32) for _ in "kv"]
        for own, name in zip(chain, ("k_cache", "v_cache"), strict=True):
            own[0, :, :length] = case.arrays[name][1, :, :length]
        for depth, row in enumerate(tree.ancestors(node)):
            token = Sequence(slot=0, length=length + depth, parents=1)
            qkv = case.arrays["qkv"][7 + row : 8 + row]
            alone = make_case(rng, [token], head_size=128, heads=2, kv_heads=1, qkv=qkv, caches=(chain[0], chain[1]))
            arguments = tensors(alone)
            np.testing.assert_array_equal(attend(alone, arguments)[0], out[row])
            chain = [arguments[name].numpy() for name in ("k_cache", "v_cache")]


def test_a_causal_chunk_has_the_bits_of_steps_of_one_row(rng):
    chunk = make_case(rng, [Sequence(slot=0, length=240, parents=20)], heads=1, kv_heads=1)
    out = attend(chunk, tensors(chunk))
    caches = chunk.arrays["k_cache"], chunk.arrays["v_cache"]
    for i in range(20):
        token = Sequence(slot=0, length=240 + i, parents=1)
        one = make_case(rng, [token], heads=1, kv_heads=1, qkv=chunk.arrays["qkv"][i : i + 1], caches=caches)
        arguments = tensors(one)
        np.testing.assert_array_equal(attend(one, arguments)[0], out[i])
        caches = arguments["k_cache"].numpy(), arguments["v_cache"].numpy()


def test_levels_behind_earlier_rows_and_chains_without_mask(rng):
    for words in (0, 1):
        case = make_levels(rng, words)
        expected, _, _ = case.reference()
        np.testing.assert_allclose(attend(case, tensors(case)), expected, atol=1e-5)
        if not words:
            bare = tensors(case) | {"tree_mask": torch.zeros(0, 0, dtype=torch.int32)}
            np.testing.assert_allclose(attend(case, bare), expected, atol=1e-5)
