"""A step's rows as an engine takes them, written by one call of compiled code without the interpreter's lock."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from redraft.batch import TargetBatch
from redraft.decoding.native import expect
from redraft.decoding.token_tree import TokenTree
from redraft.plugins.kernels import data_of
from redraft.plugins.trees.native import address, call, pointer

NO_PROMPTS = 0, None, None, None


@dataclass
class PromptRows:
    """The next rows of a prompt."""

    tokens: np.ndarray
    """int32 [n]"""
    logits: int
    """How many of them, the last ones, have logits."""


@dataclass
class Places:
    """Where the rows of B sequences go, by sequence: its slot, how many of its tokens are cached, and which rows of its
    last step are moved into place before, see `TargetBatch`."""

    slots: Sequence[int]
    cache_lengths: Sequence[int]
    commits: Sequence[Sequence[int]]


def pack(tree: TokenTree, prompts: Sequence[PromptRows], places: Places, words: int) -> TargetBatch:
    """The rows of trees and, after them, of prompts, whose places follow in the same order. Masks are of `words` words.

    A tree's node stands at its depth below the root and sees its own path: `TokenTree.ancestors` as `mask_words`. All
    nodes have logits. Rows of prompts are causal.

    Raises ValueError if a tree has a node that the words do not hold.
    """
    count = len(tree) + len(prompts)
    expect(count, places.slots, places.cache_lengths, places.commits)
    cache_lengths, commits = array("i", places.cache_lengths), array("i", [*chain(*places.commits)])
    commit_rows = array("i", [*map(len, places.commits)])
    rows = logits = len(tree.tokens)
    columns: tuple[Any, ...] = NO_PROMPTS
    if prompts:
        prompt_rows = array("i", [len(prompt.tokens) for prompt in prompts])
        prompt_logits = array("i", [prompt.logits for prompt in prompts])
        tokens = array("q", [data_of(prompt.tokens) for prompt in prompts])
        columns = len(prompts), address(tokens), address(prompt_rows), address(prompt_logits)
        rows, logits = rows + sum(prompt_rows), logits + sum(prompt_logits)
    positions, masks, logit_rows = rows, 2 * rows, (2 + words) * rows
    row_offsets = logit_rows + logits
    commit_offsets = row_offsets + count + 1
    packed = np.empty(commit_offsets + count + 1, np.int32)
    sequences = address(cache_lengths), address(commit_rows)
    call("rows_pack", len(tree), *tree.addresses[:3], *columns, *sequences, words, pointer(packed, np.int32))
    return TargetBatch(
        input_ids=packed[:positions],
        positions=packed[positions:masks],
        row_offsets=packed[row_offsets:commit_offsets],
        slots=np.array(places.slots, np.int32),
        cache_lengths=np.array(cache_lengths),
        tree_mask=packed[masks:logit_rows].reshape(rows, words),
        commit_src=np.array(commits),
        commit_offsets=packed[commit_offsets:],
        logit_rows=packed[logit_rows:row_offsets],
    )
