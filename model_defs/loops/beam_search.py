"""The drafting loop, unrolled in a drafter's network: beam search (ReDrafter, section 3.2) over any draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor, nn

from redraft.plugins.operators.beam_step.reference import beam_step


@dataclass
class Children:
    """M nodes drafted below others, one row each, those of a sequence back to back."""

    tokens: Tensor
    """int32 [M]"""
    origins: Tensor
    """int32 [M], the row of the parent among the nodes that were expanded"""
    sequences: Tensor
    """int32 [M], the row of the sequence in the batch"""
    width: int
    """children of each sequence"""


class Paths(Protocol):
    """A draft model at N nodes that are about to be expanded, one row each; at first the B roots."""

    raw_logits: Tensor | None
    """float [B * L, K]: logits of all levels of all sequences, where they do not depend on the nodes"""

    def most_likely(self, count: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N, count], descending, and target ids int32 [N, count] of the most likely next tokens."""
        ...

    def extend(self, children: Children) -> Self:
        """The draft model at the children, which are expanded next."""
        ...


BeamStep = Callable[..., tuple[Tensor, ...]]
"""A level of a beam search: see plugins/beam_step."""


class BeamSearch(nn.Module):
    """Each of `length` levels expands at most `width` nodes (the most likely candidates of the level before, by
    cumulative probability) into `candidates` children each. The last level's best candidates are the beams; the best
    candidates of all levels are a best-first tree."""

    def __init__(self, drafter: Any, width: int, length: int, candidates: int):
        """`drafter.paths(*inputs)` gives the roots of a batch as `Paths`."""
        super().__init__()
        if candidates < width:
            raise ValueError(f"candidates is {candidates}, expected at least the beam width {width}")
        self.drafter = drafter
        self.width, self.length, self.candidates = width, length, candidates

    def forward(self, inputs: Sequence[Tensor], beam_step: BeamStep = beam_step) -> tuple[Tensor, ...]:
        """The inputs of `drafter.paths` to candidates i32 [B, L, W, K] (target ids), log_probs f32 [B, L, W, K]
        (cumulative; -inf where absent), parents i32 [B, L, W] (flat candidate w * K + k of the level before) and, where
        the paths have them, raw logits f32 [B * L, K]."""
        paths: Paths = self.drafter.paths(*inputs)
        raw_logits = paths.raw_logits
        draft, sequences = list[Tensor](), None
        for level in range(self.length):
            values, ids = paths.most_likely(self.candidates)
            *draft, tokens, origins = beam_step(values, ids, self.width, *draft)
            sequences = origins if sequences is None else sequences
            if level + 1 < self.length:
                paths = paths.extend(Children(tokens, origins, sequences, self.width))
        candidates, log_probs, parents, _ = draft
        return (candidates, log_probs, parents, *(() if raw_logits is None else (raw_logits,)))
