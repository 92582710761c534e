"""Generations of a drafter: each was trained on from the one before by what was served."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

FILE = "generation.json"
"""It lies beside the drafter's weights, and in the bundles that are built with them."""


class Generation(BaseModel):
    """One generation."""

    number: int
    """From 1; a drafter that has learned nothing from traffic has none."""

    @classmethod
    def of(cls, folder: Path) -> Generation | None:
        """The generation of a drafter's or a bundle's folder; None where it has none that can be read."""
        with suppress(OSError, ValueError):
            return cls.model_validate_json((folder / FILE).read_bytes())
        return None

    def write(self, folder: Path) -> None:
        """Store it in a drafter's or a bundle's folder, whole or not at all. Raises OSError."""
        partial = folder / f".{FILE}.partial"
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(folder / FILE)
