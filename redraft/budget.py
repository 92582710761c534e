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
    """One method's budgets. `construction` and `ngram`, where given, replace the bundle's."""

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

    def lookup(self, running: int, greedy: bool) -> int:
        """Tree budget with `running` sequences: that of the next larger count measured, or of the largest."""
        for entry in self.entries:
            if entry.running >= running:
                break
        return entry.greedy if greedy else entry.sampled


class BudgetFile(BaseModel):
    """Written by `build/tune.py` next to the engines: the tables of the methods that were tuned."""

    model_config = ConfigDict(extra="forbid")

    methods: dict[str, BudgetTable] = Field(default_factory=dict)

    @classmethod
    def load(cls, bundle: Path) -> BudgetFile:
        """A bundle's tables; none where it has not been tuned. Raises ValueError naming the file that is no table."""
        path = bundle / FILE_NAME
        if not path.is_file():
            return cls()
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ValueError(f"{path} does not hold budget tables; run tune again: {error}") from None
