"""Features as arrays and as tensors: the same rows, copied, and joined when many parts have gathered."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from redraft.engines.features import join, on_host, take_rows
from redraft.pairs import MOST_PARTS, Pairs

STATES = np.arange(30, dtype=np.float32).reshape(6, 5)
KINDS = {"array": STATES.copy, "tensor": lambda: torch.tensor(STATES), "bf16": lambda: torch.tensor(STATES).bfloat16()}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_copies(kind):
    """Also those that follow each other, and all of them."""
    for rows in ([4, 0, 4], [1, 2, 3], list(range(6)), [5]):
        features = KINDS[kind]()
        taken = take_rows(features, rows)
        features[:] = -1
        assert type(taken) is type(features)
        assert taken.dtype == features.dtype
        np.testing.assert_array_equal(on_host(taken), STATES[rows], strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_stay_in_order_and_in_few_parts(kind):
    """A sequence that does not draft holds on to few steps' memory."""
    features, pairs = KINDS[kind](), Pairs()
    for step in range(5 * MOST_PARTS):
        pairs.add(features[step % 6 : step % 6 + 1], [step])
        assert len(pairs.features) <= MOST_PARTS
    parts, tokens = pairs.take()
    assert tokens == list(range(5 * MOST_PARTS))
    np.testing.assert_array_equal(on_host(join(parts)), np.tile(STATES, (27, 1))[: 5 * MOST_PARTS])
    assert (pairs.ingested, pairs.features, pairs.tokens) == (5 * MOST_PARTS, [], [])
