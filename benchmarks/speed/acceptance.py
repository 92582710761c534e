"""What drafts gained, from the statistics of decoded answers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, zip_longest
from typing import Any

from redraft.llm import Answer
from redraft.request import SequenceStats


def depth_counts(stats: list[SequenceStats]) -> list[tuple[int, int]]:
    """Per depth, over all steps, how often a token was accepted and how often the tree offered one below the path."""

    def totals(lists: list[list[int]]) -> list[int]:
        return [sum(counts) for counts in zip_longest(*lists, fillvalue=0)]

    accepted, offered = ([getattr(item, f"{kind}_by_depth") for item in stats] for kind in ("accepted", "offered"))
    return list(zip(totals(accepted), totals(offered), strict=True))


def acceptance_figures(answers: list[Answer]) -> dict[str, Any]:
    """Acceptance and rows over all steps of some answers; prefill rows are left out."""
    stats = [answer.stats for answer in answers]
    steps, drafted, accepted = (sum(getattr(item, key) for item in stats) for key in ("steps", "drafted", "accepted"))
    prompt_rows = sum(item.prompt_tokens for item in stats)
    counts = depth_counts(stats)
    return {
        "steps": steps,
        "acceptance_length": 1 + accepted / steps if steps else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "drafted": drafted,
        "wasted": drafted - accepted,
        "reused": sum(item.reused for item in stats),
        "depth_counts": counts,
        "conditional_acceptance": [
            ours / before if before else 0.0 for ours, before in conditional_acceptance(steps, (n for n, _ in counts))
        ],
        "rows_per_step": (sum(item.rows_executed for item in stats) - prompt_rows) / steps if steps else None,
    }


def conditional_acceptance(steps: int, accepted: Iterable[int]) -> list[tuple[int, int]]:
    """Per depth, how often a token was accepted at it, and how often one was at the depth before, of which depth 0 is
    accepted in every step. Their quotient is the conditional acceptance rate; where a tree ends, it rejects."""
    return [(ours, before) for before, ours in pairwise((steps, *accepted))]
