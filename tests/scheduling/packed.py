"""What `redraft.scheduling.packing.pack` writes, by the sets of bits that `TokenTree.ancestors` gives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from redraft.batch import TargetBatch
from redraft.decoding.token_tree import TokenTree, mask_words
from redraft.scheduling.packing import Places, PromptRows


def pack(tree: TokenTree, prompts: Sequence[PromptRows], places: Places, words: int) -> TargetBatch:
    ids, positions, paths, logit_rows, ends = [], [], [], [], [0]
    for nodes, ancestors, start in zip(tree.nodes, tree.ancestors, places.cache_lengths, strict=False):
        logit_rows += range(len(ids), len(ids) + len(nodes))
        ids += [token for token, _, _ in nodes]
        positions += [start + path.bit_count() - 1 for path in ancestors]
        paths += ancestors
        ends.append(len(ids))
    for prompt, start in zip(prompts, places.cache_lengths[len(tree) :], strict=True):
        ids += prompt.tokens.tolist()
        positions += range(start, start + len(prompt.tokens))
        paths += [0] * len(prompt.tokens)
        logit_rows += range(len(ids) - prompt.logits, len(ids))
        ends.append(len(ids))
    return TargetBatch(
        input_ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        row_offsets=np.array(ends, np.int32),
        slots=np.array(places.slots, np.int32),
        cache_lengths=np.array(places.cache_lengths, np.int32),
        tree_mask=np.array(mask_words(paths, words), np.uint32).view(np.int32).reshape(-1, words),
        commit_src=np.array([*chain(*places.commits)], np.int32),
        commit_offsets=np.array([0, *accumulate(map(len, places.commits))], np.int32),
        logit_rows=np.array(logit_rows, np.int32),
    )
