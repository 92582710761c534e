"""The choice: the number of draft nodes that makes the most tokens per second."""

from __future__ import annotations

import numpy as np


def best_count(chances: np.ndarray, tokens: float, seconds: np.ndarray) -> int:
    """How many of a batch's nodes to verify, given the chance p of each to be accepted, the best first: the n that
    maximizes

        (tokens + p[0] + ... + p[n - 1]) / seconds[n],

    the expected tokens of the step over its time. `tokens` is what the step yields without drafts, one for each
    sequence; `seconds` [N + 1] is the predicted time with 0 to N nodes. The fewest nodes of equally good counts.

    A node's chance is at most its parent's, so the best nodes of all trees are trees too, and no other n nodes promise
    more. The time may have cliffs: every n is tried.
    """
    expected = tokens + np.concatenate([np.zeros(1), np.cumsum(chances, dtype=np.float64)])
    return int(np.argmax(expected / seconds))
