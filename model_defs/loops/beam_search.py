"""The drafting loop, unrolled in a drafter's network: beam search (ReDrafter, section 3.2) over any draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from redraft.model_defs.loops.operators import TORCH, Operators
from redraft.model_defs.loops.paths import Children, Paths

NOISE_INPUTS = 6
"""Inputs that say which noise the target will draw with."""


class BeamSearch(nn.Module):
    """Each of `length` levels expands at most `width` nodes (the most likely candidates of the level before, by
    cumulative probability) into `candidates` children each. The last level's best candidates are the beams; the best
    candidates of all levels are a best-first tree.

    With a `support`, a node's candidates are chosen by the target's noise from so many of its most likely tokens, and
    their scores stand for probabilities: see plugins/operators/perturbed_topk. Greedy sequences do not notice."""

    def __init__(self, drafter: Any, width: int, length: int, candidates: int, support: int = 0):
        """`drafter.paths(operators, *inputs)` gives the roots of a batch as `Paths`."""
        super().__init__()
        if candidates < width:
            raise ValueError(f"candidates is {candidates}, expected at least the beam width {width}")
        if support and support < candidates:
            raise ValueError(f"support is {support}, expected at least the {candidates} candidates, or 0")
        self.drafter = drafter
        self.width, self.length, self.candidates, self.support = width, length, candidates, support

    def forward(self, inputs: Sequence[Tensor], operators: Operators = TORCH) -> tuple[Tensor, ...]:
        """The inputs of `drafter.paths`, and with a support those of `redraft.batch.SharedNoise` in its order (seeds
        as int32 [B, 2], the low word first), to candidates i32 [B, L, W, K] (target ids), log_probs f32 [B, L, W, K]
        (cumulative; -inf where absent), parents i32 [B, L, W] (flat candidate w * K + k of the level before) and, where
        the paths have them, raw logits f32 [B * L, K]."""
        count = len(inputs) - (NOISE_INPUTS if self.support else 0)
        paths: Paths = self.drafter.paths(operators, *inputs[:count])
        raw_logits = paths.raw_logits
        draft, sequences = list[Tensor](), None
        for level in range(self.length):
            values, ids = paths.most_likely(self.support or self.candidates)
            if self.support:
                values, ids = operators.perturbed_topk(values, ids, *inputs[count:], level=level, k=self.candidates)
            *draft, tokens, origins = operators.beam_step(values, ids, self.width, *draft)
            sequences = origins if sequences is None else sequences
            if level + 1 < self.length:
                paths = paths.extend(Children(tokens, origins, sequences, self.width))
        candidates, log_probs, parents, _ = draft
        return (candidates, log_probs, parents, *(() if raw_logits is None else (raw_logits,)))
