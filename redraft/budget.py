"""The budget table: how many nodes to draft per sequence, given how many sequences are running."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

FILE_NAME = "budget.json"


class BudgetEntry(BaseModel):
    """Tree budgets per sequence and step while `running` sequences decode; 0 means no drafting."""

    model_config = ConfigDict(extra="forbid")

    running: int = Field(ge=1)
    greedy: int = Field(ge=0)
    sampled: int = Field(ge=0)


class BudgetTable(BaseModel):
    """Written by `build/tune.py` next to the engines. `construction` and `ngram`, where given, replace the bundle's."""

    model_config = ConfigDict(extra="forbid")

    entries: list[BudgetEntry] = Field(min_length=1)
    construction: str | None = None
    ngram: bool | None = None
    measured: dict = Field(default_factory=dict, description="step times and acceptance that the entries rest on")

    @field_validator("entries")
    @classmethod
    def _by_load(cls, entries: list[BudgetEntry]) -> list[BudgetEntry]:
        return sorted(entries, key=lambda entry: entry.running)

    @classmethod
    def constant(cls, budget: int) -> BudgetTable:
        """The same budget whatever runs: what an untuned bundle uses."""
        return cls(entries=[BudgetEntry(running=1, greedy=budget, sampled=budget)])

    @classmethod
    def load(cls, path: Path) -> BudgetTable:
        """Read a table. Raises ValueError naming the file when it is not one."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ValueError(f"{path} is not a budget table; run tune again: {error}") from None

    def lookup(self, running: int, greedy: bool) -> int:
        """Tree budget with `running` sequences: that of the next larger count measured, or of the largest."""
        for entry in self.entries:
            if entry.running >= running:
                break
        return entry.greedy if greedy else entry.sampled
