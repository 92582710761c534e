"""Fixed budgets, for studies and tests: how many nodes to draft per sequence, given how many sequences are running and
their temperature. A server's own are chosen at each step: see `redraft.budgets`."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator


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


class BudgetTable(BaseModel):
    """One method's budgets, of which a sequence takes those of the nearest temperature below its own."""

    model_config = ConfigDict(extra="forbid")

    entries: list[BudgetEntry] = Field(min_length=1)

    @field_validator("entries")
    @classmethod
    def _by_load(cls, entries: list[BudgetEntry]) -> list[BudgetEntry]:
        if not any(entry.temperature == 0 for entry in entries):
            raise ValueError("expected one of temperature 0")
        return sorted(entries, key=lambda entry: entry.running)

    @classmethod
    def constant(cls, budget: int) -> BudgetTable:
        """The same budget whatever runs."""
        return cls(entries=[BudgetEntry(running=1, nodes=budget)])

    def lookup(self, running: int, temperature: float) -> Budget:
        """Tree budget with `running` sequences: that of the next larger count, or of the largest."""
        below = max(entry.temperature for entry in self.entries if entry.temperature <= temperature)
        for entry in self.entries:
            if entry.temperature == below:
                result = entry
                if entry.running >= running:
                    break
        return Budget(result.nodes, result.chance)
