"""A step's rows, packed by compiled code, against the plain way to pack them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.decoding.token_tree import MASK_BITS, TokenTree
from redraft.plugins.trees.native import call, pointer
from redraft.scheduling.packing import Places, PromptRows, pack
from tests.compiled_trees import EXAMPLES, forests, in_arrays, run_mutant, run_sanitized
from tests.scheduling import packed

NO_TREES = TokenTree.root_only([])


@st.composite
def prompts(draw: st.DrawFn) -> PromptRows:
    """Up to 40 rows, the last of which have logits. They stand anywhere in a longer text."""
    text = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)), np.int32)
    tokens = text[draw(st.integers(0, len(text) - 1)) :]
    return PromptRows(tokens, draw(st.integers(0, len(tokens))))


def places(count: int) -> st.SearchStrategy[Places]:
    """Those of `count` sequences."""
    numbers = st.lists(st.integers(0, 10**6), min_size=count, max_size=count)
    commits = st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=count, max_size=count)
    return st.builds(Places, slots=numbers, cache_lengths=numbers, commits=commits)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.one_of(forests(), st.just(NO_TREES)), st.lists(prompts(), max_size=4), st.integers(2, 3), st.data())
def test_rows_are_packed_alike(tree, after, words, data):
    """Trees alone, prompts alone, both, and nothing at all."""
    there = data.draw(places(len(tree) + len(after)))
    expected, batch = packed.pack(tree, after, there, words), pack(in_arrays(tree), after, there, words)
    for name, array in vars(expected).items():
        mine = getattr(batch, name)
        assert (mine.dtype, mine.shape) == (np.int32, array.shape), name
        assert mine.tolist() == array.tolist(), name


def test_a_tree_that_its_mask_does_not_hold_is_refused():
    tree = TokenTree.from_nodes([[(0, -1, 0.0), *((1, node, 0.0) for node in range(MASK_BITS))]])
    with pytest.raises(ValueError, match="33 tree nodes do not fit 1 mask words of 32 bits"):
        pack(tree, [], Places([0], [7], [[]]), 1)


def test_columns_of_another_length_are_refused():
    tree, prompt = TokenTree.root_only([1, 2]), PromptRows(np.arange(3, dtype=np.int32), 1)
    for wrong in (Places([0] * 2, [0] * 3, [[]] * 3), Places([0] * 3, [0] * 2, [[]] * 3), Places([0] * 3, [0] * 3, [])):
        with pytest.raises(ValueError, match="expected 3 entries each"):
            pack(tree, [prompt], wrong, 1)


def test_errors_of_the_library_are_raised():
    offsets, roots, parents = (pointer(np.array(values, np.int32), np.int32) for values in ([0, 1], [4], [-1]))
    column, room = pointer(np.zeros(1, np.int32), np.int32), pointer(np.empty(9, np.int32), np.int32)
    with pytest.raises(ValueError, match="1 tree nodes do not fit 0 mask words"):
        call("rows_pack", 1, offsets, roots, parents, 0, None, None, None, column, column, 0, room)


@pytest.mark.slow
def test_no_row_is_written_outside_the_arrays(tmp_path):
    """The same properties under the address and undefined-behaviour sanitizers."""
    done = run_sanitized(tmp_path, __file__, "alike or refused")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


MUTANTS = {
    "a parent's mask": ("masks_ + parent * words_", "masks_"),
    "a prompt that sees what a tree left": ("std::fill_n(masks_, rows * words_, 0)", "std::fill_n(masks_, rows, 0)"),
    "logits of a prompt's first rows": ("rows_ - logits)", "rows_ - rows)"),
    "a prompt where the tree before it stands": ("++starts_;", "starts_ += logits > 0;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_compiled_code_is_found(mutant, tmp_path):
    assert run_mutant(tmp_path, "pack.h", *MUTANTS[mutant], __file__, "alike").returncode == 1
