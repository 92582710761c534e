"""The budget table: how many nodes to draft per sequence, given how many sequences are running and their temperature,
and how nodes are scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from redraft.decoding import defaults

AtTemperature = TypeVar("AtTemperature", "BudgetEntry", "Scores")


class Budget(NamedTuple):
    """How much of a draft tree is verified: at most `nodes`, each with at least this `chance` to be accepted."""

    nodes: int
    chance: float = 0.0


class BudgetEntry(BaseModel):
    """The tree budget of a sequence at `temperature` in each step in which `running` sequences decode; 0 nodes mean no
    drafting. Nodes whose estimated chance to be accepted is below `chance` are left out."""

    model_config = ConfigDict(extra="forbid")

    running: int = Field(ge=1)
    temperature: float = Field(default=0.0, ge=0)
    nodes: int = Field(ge=0)
    chance: float = Field(default=0.0, ge=0, lt=1)


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
    """What the odds of n-gram guesses are multiplied by: they are those of greedy answers."""

    def beta(self, temperature: float) -> float:
        """Beta in the score softmax(beta (slope log p + g)) of a drafter's candidates: `sharpness` times a sequence's
        own temperature. So towards temperature 0, where noise decides nothing, a score becomes the drafter's
        probability at temperature 1. For temperature 0 it is 1, and has no effect."""
        return self.sharpness * temperature if temperature else 1.0


UNFITTED = tuple(Scores(**scores) for scores in defaults.SCORES)
"""Used until a method is tuned."""


class BudgetTable(BaseModel):
    """One method's budgets and scores, of which a sequence takes those of the nearest temperature below its own.
    `construction` and `ngram`, where given, replace the bundle's."""

    model_config = ConfigDict(extra="forbid")

    entries: list[BudgetEntry] = Field(min_length=1)
    scores: tuple[Scores, ...] = UNFITTED
    construction: str | None = None
    ngram: bool | None = None
    measured: dict = Field(default_factory=dict, description="step times and acceptance that the entries rest on")

    @field_validator("entries", "scores")
    @classmethod
    def _from_greedy_on(cls, rows: Sequence[AtTemperature]) -> Sequence[AtTemperature]:
        if not any(row.temperature == 0 for row in rows):
            raise ValueError("expected one of temperature 0")
        return rows

    @field_validator("entries")
    @classmethod
    def _by_load(cls, entries: list[BudgetEntry]) -> list[BudgetEntry]:
        return sorted(entries, key=lambda entry: entry.running)

    @classmethod
    def constant(cls, budget: int) -> BudgetTable:
        """The same budget whatever runs: what an untuned bundle uses."""
        return cls(entries=[BudgetEntry(running=1, nodes=budget)])

    def lookup(self, running: int, temperature: float) -> Budget:
        """Tree budget with `running` sequences: that of the next larger count measured, or of the largest."""
        below = _nearest(self.entries, temperature).temperature
        for entry in self.entries:
            if entry.temperature == below:
                result = entry
                if entry.running >= running:
                    break
        return Budget(result.nodes, result.chance)

    def scores_at(self, temperature: float) -> Scores:
        """How a sequence's nodes are scored."""
        return _nearest(self.scores, temperature)


def _nearest(rows: Sequence[AtTemperature], temperature: float) -> AtTemperature:
    """The first one of the nearest temperature below."""
    return max((row for row in rows if row.temperature <= temperature), key=lambda row: row.temperature)
