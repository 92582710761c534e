"""Compiled n-grams, and compiled walking of trees, against the Python functions that they repeat."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.decoding import native
from redraft.decoding.native import NativeNgrams, Walkers
from redraft.decoding.ngram import NgramIndex, ngram_chains
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import TokenTree
from redraft.decoding.verification import walk, walk_all
from redraft.plugins.trees.native import pointer
from redraft.request import SamplingConfig
from tests.compiled_trees import EXAMPLES, TOKENS, forests, in_arrays, in_process, run_mutant, run_sanitized


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=6), st.lists(st.integers(0, 3), max_size=8))
def test_ngrams_are_indexed_alike(parts, tail):
    """Read in one piece or several, asked about any tail, drafted from with a table and without."""
    table = np.array([1, -1, 0, 2], np.int32)
    compiled, plain = NativeNgrams((), table), NgramIndex((), table)
    for part in parts:
        compiled.extend(part)
        plain.extend(part)
        assert compiled.tail == plain.tail
        assert compiled.match(tuple(tail)) == plain.match(tuple(tail))
        assert compiled.draft(5, 0.4) == plain.draft(5, 0.4)
    text = [token for part in parts for token in part]
    if text:
        roots = np.array(text[-1:], np.int32)
        chains = [ngram_chains(roots, [index], [1.0], 6).nodes for index in (NativeNgrams(text, table), plain)]
        assert chains[0] == chains[1]


def test_a_long_text_of_many_tokens_is_indexed_alike():
    """The table of slots grows many times; token ids up to the largest."""
    rng = np.random.default_rng(0)
    text = (2**31 - 1 - rng.integers(0, 60, 5000)).tolist()
    compiled, plain = NativeNgrams(text), NgramIndex(text)
    for end in range(1, 4000):
        assert compiled.match(tuple(text[max(end - 6, 0) : end])) == plain.match(tuple(text[max(end - 6, 0) : end]))


@settings(max_examples=EXAMPLES, deadline=None)
@given(forests(), st.data())
def test_chosen_tokens_are_walked_alike(tree, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    chosen = rng.integers(0, TOKENS, len(tree.tokens)).astype(np.int32)
    ends = [data.draw(st.frozensets(st.integers(0, TOKENS - 1), max_size=2)) for _ in range(len(tree))]
    samplers, others = ([Sampler(SamplingConfig(), [0], ids) for ids in ends] for _ in range(2))
    verdicts = walk_all(in_arrays(tree), chosen, Walkers(samplers))
    for index, (verdict, sampler, other) in enumerate(zip(verdicts, samplers, others, strict=True)):
        rows = chosen[tree.offsets[index] : tree.offsets[index + 1]]
        assert verdict == walk(tree, index, rows, other)
        assert sampler.position == other.position


SAMPLINGS = ({}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 3}, {"temperature": 1.0, "top_p": 0.6})


@settings(max_examples=EXAMPLES, deadline=None)
@given(forests(), st.sampled_from([1, 5, 17, 111, 5000]), st.data())
def test_tokens_are_chosen_and_walked_alike(tree, vocabulary, data):
    """From logits with ties, greedy and sampled beside each other, at any output position."""
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    logits = rng.normal(0, 3, (len(tree.tokens), vocabulary)).astype(np.float32)
    logits[:, :TOKENS] += 6  # most tokens that are chosen may have been drafted
    if data.draw(st.booleans()):
        logits = logits.round()
    configs = [
        SamplingConfig(seed=data.draw(st.integers(0, 99)), **data.draw(st.sampled_from(SAMPLINGS)))
        for _ in range(len(tree))
    ]
    ends = [data.draw(st.frozensets(st.integers(0, TOKENS - 1), max_size=2)) for _ in range(len(tree))]
    samplers, others = (
        [Sampler(config, [0], ids) for config, ids in zip(configs, ends, strict=True)] for _ in range(2)
    )
    for sampler in (*samplers, *others):
        sampler.skip(7)
    verdicts = walk_all(in_arrays(tree), logits, Walkers(samplers))
    rows = np.split(logits, tree.offsets[1:-1])
    for index, (verdict, sampler, other) in enumerate(zip(verdicts, samplers, others, strict=True)):
        assert verdict == walk(tree, index, rows[index], other)
        assert sampler.position == other.position


def test_the_first_of_the_largest_logits_is_chosen_wherever_it_is():
    """In whole blocks and beside them, with a draft and without. A NaN comes before all numbers, as it does for
    numpy."""
    walkers = Walkers([Sampler(SamplingConfig(), [0])])
    trees = TokenTree.root_only([0]), TokenTree.from_nodes([[(0, -1, 0.0), (TOKENS + 9001, 0, 0.0)]])
    for vocabulary in (1, 15, 16, 4095, 4096, 4097, 9001):
        for place in {0, vocabulary // 2, vocabulary - 1}:
            logits = np.full((2, vocabulary), -np.inf, np.float32)
            logits[0, place] = -5.0
            logits[0, place + 1 :: 7] = -5.0
            for equal in (-5.0, np.nan):
                logits[0, place:] = np.where(np.arange(vocabulary - place) % 7 < 2, equal, logits[0, place:])
                for tree in trees:
                    verdicts = native.walk_trees(tree, logits[: len(tree.tokens)], walkers)
                    assert verdicts == [([0], [place])]


def test_arrays_of_another_type_or_order_are_refused():
    for array in (np.zeros(4), np.zeros((4, 4), np.int32)[:, 1]):
        with pytest.raises(TypeError, match="expected contiguous int32"):
            pointer(array, np.int32)


def test_indices_are_freed_with_their_owners():
    """Memory of the process stays where it was; with indices that are kept it grows by 300 MB."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 50000, 3000).tolist()
    grown = []
    for _ in range(3):
        for _ in range(50):
            NativeNgrams(text).match((1,))
        gc.collect()
        with open("/proc/self/statm") as file:
            grown.append(int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6)
    assert grown[2] - grown[0] < 40


@pytest.mark.slow
def test_no_tree_leads_outside_the_arrays(tmp_path):
    """The same properties under the address and undefined-behaviour sanitizers."""
    done = run_sanitized(tmp_path, __file__, "alike or refused")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


MUTANTS = {
    "a later one of equal logits": ("walk.h", "most_here > best)", "most_here >= best)", "wherever"),
    "the position of the root": ("walk.h", "positions[tree] + depth", "positions[tree]", "alike and walked"),
    "times that are never counted anew": (
        "ngrams.h",
        "token ? slot.times : 0",
        "token ? slot.times : 1",
        "alike and ngrams",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_compiled_code_is_found(mutant, tmp_path):
    *edit, tests = MUTANTS[mutant]
    assert run_mutant(tmp_path, *edit, __file__, tests).returncode == 1


def test_a_process_ends_while_another_thread_drafts():
    """It would catch n-grams that are freed at exit, under a thread that reads them."""
    code = """
import threading
from redraft.decoding.native import NativeNgrams, Walkers

index, begun = NativeNgrams(range(2000)), threading.Event()

def draft():
    while True:
        index.extend([1, 2, 3] * 500)
        index.match((1, 2, 3))
        begun.set()

threading.Thread(target=draft, daemon=True).start()
begun.wait()
"""
    for _ in range(3):
        assert in_process(code).returncode == 0


def test_columns_of_another_length_are_refused():
    tree = in_arrays(TokenTree.from_nodes([[(1, -1, 0.0), (2, 0, -0.5)]] * 3))
    sampler = Sampler(SamplingConfig(), [0])
    for wrong in (
        lambda: native.walk_trees(tree, np.zeros(4, np.int32), Walkers([sampler] * 3)),
        lambda: native.walk_trees(tree, np.zeros((4, 111), np.float32), Walkers([sampler] * 3)),
        lambda: native.walk_trees(tree, np.zeros(6, np.int32), Walkers([sampler] * 2)),
    ):
        with pytest.raises(ValueError, match="expected"):
            wrong()
