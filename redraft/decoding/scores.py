"""Scores of drafted nodes: the numbers that make a score the log of the chance to be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from redraft.decoding import defaults

Chance = Annotated[float, Field(gt=0, lt=1)]
Factor = Annotated[float, Field(ge=0)]


class NgramScores(BaseModel):
    """How the n-gram guesses of a method are scored, at every temperature."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chances: dict[int, tuple[Chance, Chance, Chance, Chance]] = dict(defaults.NGRAM_CHANCES)
    """See `defaults.NGRAM_CHANCES`, which has the lengths."""
    joint_odds: tuple[Factor, Factor] | None = None
    """The factors of `growth.joint_odds`; None: those of `defaults.JOINT_ODDS` for the drafter."""

    @field_validator("chances")
    @classmethod
    def _of_all_lengths(
        cls, chances: dict[int, tuple[float, float, float, float]]
    ) -> dict[int, tuple[float, float, float, float]]:
        if chances.keys() != defaults.NGRAM_CHANCES.keys():
            raise ValueError(f"expected lengths {', '.join(map(str, defaults.NGRAM_CHANCES))}")
        return {length: chances[length] for length in defaults.NGRAM_CHANCES}

    def joint(self, reads_context: bool) -> tuple[float, float]:
        """The factors of `growth.joint_odds` for a drafter that reads the context, or not."""
        return self.joint_odds or defaults.JOINT_ODDS[reads_context]


class Scores(BaseModel):
    """How the nodes of a sequence at `temperature` are scored, so that a score is the log of the chance to be accepted:
    three numbers that tuning fits. At temperature 0 all are 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=0.0, ge=0)
    slope: float = Field(default=1.0, gt=0)
    """What a drafter's log-probabilities at the sequence's temperature are multiplied by before the noise is added:
    above 1 where the drafter is less sure than the target."""
    sharpness: float = Field(default=1.0, gt=0)
    """See `beta`."""
    ngram_odds: float = Field(default=1.0, gt=0)
    """What the odds of n-gram guesses are multiplied by: their chances are those of greedy answers."""

    def beta(self, temperature: float) -> float:
        """Beta in the score softmax(beta (slope log p + g)) of a drafter's candidates: `sharpness` times a sequence's
        own temperature. So towards temperature 0, where noise decides nothing, a score becomes the drafter's
        probability at temperature 1. For temperature 0 it is 1, and has no effect."""
        return self.sharpness * temperature if temperature else 1.0


UNFITTED = tuple(Scores(**scores) for scores in defaults.SCORES)
"""Used until a method's scores are fitted."""


def scores_at(scores: Sequence[Scores], temperature: float) -> Scores:
    """Those of the nearest temperature below, the first of which is 0."""
    return max((row for row in scores if row.temperature <= temperature), key=lambda row: row.temperature)
