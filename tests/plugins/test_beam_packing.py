"""The CPU kernel, the CUDA kernel's own source run on the CPU, and what the host packs, against the reference."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins import kernels
from plugins.beam_packing.reference import pack_beams
from plugins.beam_packing.tensorrt_plugin import MOST_DRAFTED, PACK_BEAMS
from plugins.cuda.launch import run
from redraft.decoding import packing


def check(
    roots: np.ndarray, beams: np.ndarray, log_probs: np.ndarray, lengths: np.ndarray, *, descending: bool
) -> None:
    inputs = [torch.from_numpy(array) for array in (roots, beams, log_probs, lengths)]
    found = run(PACK_BEAMS, inputs, {}, descending=descending)
    expected = pack_beams(*inputs)
    on_cpu = kernels.pack_beams(roots, beams, log_probs, lengths)
    for output, tensor, array, wanted in zip(PACK_BEAMS.outputs, found, on_cpu, expected, strict=True):
        assert torch.equal(tensor, wanted), output.name
        np.testing.assert_array_equal(array, wanted.numpy(), output.name, strict=True)
    tokens, parents, _, _, scores, sizes = (tensor.numpy() for tensor in expected)
    tree, nodes = packing.pack_beams(roots, beams, log_probs), sizes.max()
    for packed, wanted in ((tree.tokens, tokens), (tree.parents, parents), (tree.scores, scores)):
        np.testing.assert_array_equal(packed, wanted[:, :nodes])
    np.testing.assert_array_equal(tree.sizes, sizes)


def test_a_tree_in_full():
    """Two beams of three with one token in common, then the one that is none; 4 rows are in the cache."""
    beams = torch.tensor([[[5, 6, 7], [5, 8, 8], [0, 0, 0]]], dtype=torch.int32)
    log_probs = torch.tensor([[[-1, -2, -3], [-1, -4, -5], [0, 0, -float("inf")]]])
    tokens, parents, positions, masks, scores, sizes = pack_beams(
        torch.tensor([9], dtype=torch.int32), beams, log_probs, torch.tensor([4], dtype=torch.int32)
    )
    none = -float("inf")
    assert tokens.tolist() == [[9, 5, 6, 7, 8, 8, 0, 0, 0, 0]]
    assert parents.tolist() == [[-1, 0, 1, 2, 1, 4, -1, -1, -1, -1]]
    assert positions.tolist() == [[4, 5, 6, 7, 6, 7, 0, 0, 0, 0]]
    assert masks.tolist() == [[[0b1], [0b11], [0b111], [0b1111], [0b10011], [0b110011], [0], [0], [0], [0]]]
    assert scores.tolist() == [[0, -1, -2, -3, -4, -5, none, none, none, none]]
    assert sizes.tolist() == [6]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_trees_are_those_of_the_reference(data):
    batch, width, length = (data.draw(st.integers(1, most)) for most in (3, 9, 7))
    vocabulary = data.draw(st.sampled_from([1, 2, 111]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    beams = rng.integers(vocabulary, size=(batch, width, length), dtype=np.int32)
    log_probs = -rng.random((batch, width, length)).astype(np.float32).cumsum(2, dtype=np.float32)
    for b in range(batch):
        log_probs[b, data.draw(st.integers(1, width)) :, -1] = -np.inf
    roots, lengths = (rng.integers(111, size=batch, dtype=np.int32) for _ in range(2))
    check(roots, beams, log_probs, lengths, descending=data.draw(st.booleans()))


@pytest.mark.parametrize(("width", "length"), [(64, 16), (33, 31), (1, 1)])
def test_more_nodes_than_threads(rng, width, length):
    beams = rng.integers(2, size=(3, width, length), dtype=np.int32)
    log_probs = np.zeros(beams.shape, np.float32)
    check(np.arange(3, dtype=np.int32), beams, log_probs, np.arange(3, dtype=np.int32), descending=False)


@pytest.mark.parametrize(("width", "length"), [(64, 32), (1025, 1), (4, 0)])
def test_beams_of_too_many_tokens_and_of_none_are_refused(width, length):
    beams = torch.zeros(2, width, length, dtype=torch.int32)
    inputs = [torch.zeros(2, dtype=torch.int32), beams, beams.float(), torch.zeros(2, dtype=torch.int32)]
    with pytest.raises(ValueError, match=rf"width {width} x length {length} is {width * length} tokens: .* 1 to 1024"):
        run(PACK_BEAMS, inputs, {})
    with pytest.raises(ValueError, match=rf"beam width x length {width * length}: expected 1 to 1024"):
        kernels.pack_beams(*(tensor.numpy() for tensor in inputs))


@pytest.mark.parametrize(
    ("place", "changed", "message"),
    [
        (0, np.zeros(1, np.int32), r"roots int32 \(1,\): expected int32 \(2,\)"),
        (1, np.zeros((3, 4), np.int32), r"beams \(3, 4\): expected three dimensions"),
        (1, np.zeros((2, 4, 3), np.int32).transpose(0, 2, 1), r"beams int32 .*: expected .*, contiguous"),
        (2, np.zeros((2, 3, 4), np.int32), r"log_probs int32 .*: expected float32 \(2, 3, 4\)"),
        (3, np.zeros(2, np.int64), r"cache_lengths int64 \(2,\): expected int32"),
    ],
)
def test_other_arrays_are_refused(place, changed, message):
    inputs = [np.zeros(2, np.int32), np.zeros((2, 3, 4), np.int32), np.zeros((2, 3, 4), np.float32)]
    inputs.append(np.zeros(2, np.int32))
    inputs[place] = changed
    with pytest.raises(ValueError, match=message):
        kernels.pack_beams(*inputs)


def test_the_limit_is_the_kernels():
    held = re.search(r"kMostDrafted = (\d+);", PACK_BEAMS.source.read_text())
    assert held is not None
    assert int(held[1]) == MOST_DRAFTED
