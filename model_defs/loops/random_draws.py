"""The drafting loop of random constructions, unrolled in a drafter's network: draws over any draft model (RSD,
algorithms 3-4 and 8-9; SpecTr; SpecInfer)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from redraft.model_defs.loops.operators import TORCH, Operators
from redraft.model_defs.loops.paths import Children, Paths


class RandomDraws(nn.Module):
    """Each level draws from the `support` most likely tokens of every node that the level before drew."""

    def __init__(self, drafter: Any, rule: str, levels: Sequence[int], support: int):
        """`drafter.paths(operators, *inputs)` gives the roots of a batch as `Paths`; `rule` draws `levels[l]` tokens at
        level l (of each node, or in all), see plugins/draw_step. Raises ValueError where the drafter knows fewer
        tokens."""
        super().__init__()
        if support > (size := len(drafter.hot_ids)):
            raise ValueError(f"support is {support}, expected at most the {size} tokens that the drafter knows")
        self.drafter = drafter
        self.rule, self.levels, self.support = rule, tuple(levels), support

    def forward(self, inputs: Sequence[Tensor], operators: Operators = TORCH) -> tuple[Tensor, ...]:
        """The inputs of `drafter.paths`, then noise f32 [B, R, M], temperature f32, top_k i32 and top_p f32 [B] (see
        `redraft.batch.DraftSampling`), to ids i32 and log_probs f32 [B, E, M] and draws i32 [B, D] (see
        `DraftDraws`)."""
        *own, noise, temperature, top_k, top_p = inputs
        sampling = noise, temperature, top_k, top_p
        paths: Paths = self.drafter.paths(operators, *own)
        draft = list[Tensor]()
        width = 1
        for level, count in enumerate(self.levels):
            values, ids = paths.most_likely(self.support)
            *draft, tokens, origins, sequences = operators.draw_step(values, ids, *sampling, self.rule, count, *draft)
            width = width * count if self.rule == "gumbel_top_k" else count
            if level + 1 < len(self.levels):
                paths = paths.extend(Children(tokens, origins, sequences, width))
        return tuple(draft[:3])

    @property
    def noise_rows(self) -> int:
        """R: a row of noise for each node that is expanded, or for each draw."""
        rows, width = 0, 1
        for count in self.levels:
            rows += count if self.rule == "independent" else width
            width = width * count if self.rule == "gumbel_top_k" else count
        return rows
