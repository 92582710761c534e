"""Generations of a drafter: each was trained on from the one before by what was served."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from redraft.whole_file import whole_file

FILE = "generation.json"
"""It lies beside the drafter's weights, and in the bundles that are built with them."""
SERVED = "served"
"""A link to the generation that is served, in the folder of the answers."""
WAS_SERVED = "was-served"
"""An empty file in the folder of a generation that a service was swapped to."""


class Measure(BaseModel):
    """How a generation drafts beside the drafter that it began from, on answers that it was not trained on.

    Lengths are the tokens that a step gains, the target's own included, with the one most likely chain of drafts.
    """

    answers: int
    length_before: float
    length: float
    gain_low: float
    """The 95% interval of `length - length_before`, over prompts: answers to one prompt are alike"""
    gain_high: float

    @property
    def is_better(self) -> bool:
        """Whether the gain is beyond noise."""
        return self.gain_low > 0


class Generation(BaseModel):
    """One generation."""

    number: int
    """From 1; a drafter that has learned nothing from traffic has none."""
    began_from: str = ""
    """The folder of the drafter that it began from"""
    model: str = ""
    """`model_digest` of its target"""
    positions: int = 0
    """Training positions"""
    answers: int = 0
    """Served answers that it was trained on"""
    measure: Measure | None = None

    @classmethod
    def of(cls, folder: Path) -> Generation | None:
        """The generation of a drafter's or a bundle's folder; None where it has none that can be read."""
        with suppress(OSError, ValueError):
            return cls.model_validate_json((folder / FILE).read_bytes())
        return None

    def write(self, folder: Path) -> None:
        """Store it in a drafter's or a bundle's folder, whole or not at all. Raises OSError."""
        with whole_file(folder / FILE) as file:
            file.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


def generation_folder(learned: Path, number: int) -> Path:
    """Where a folder of `serve --learn` keeps a generation."""
    return learned / "generations" / str(number)


def served_generation(learned: Path) -> Path | None:
    """The folder of the generation that a service of this folder was last swapped to; None where it was none."""
    path = learned / SERVED
    return path.resolve() if (path / "config.json").is_file() else None


def note_served(learned: Path, bundle: Path) -> None:
    """Note that a service of this folder was swapped to a bundle: the next start drafts as it does. Raises OSError."""
    made, link = Generation.of(bundle), learned / SERVED
    folder = generation_folder(learned, made.number) if made else None
    if folder is None or Generation.of(folder) != made:
        link.unlink(missing_ok=True)
        return
    (folder / WAS_SERVED).touch()
    with whole_file(link) as new:
        new.symlink_to(folder.relative_to(learned))


def better_one(learned: Path, drafter: Path) -> Path | None:
    """The folder's last generation where it is complete, better than the `drafter` that it began from, and was never
    served: the swap to it has failed, or was not asked for."""
    folder = generation_folder(learned, last_generation(learned))
    made = Generation.of(folder)
    if made is None or made.measure is None or (folder / WAS_SERVED).exists():
        return None
    return folder if made.measure.is_better and made.began_from == str(drafter) else None


def last_generation(learned: Path) -> int:
    """The number of the last generation that a folder has, complete or not; 0 where it has none."""
    names = (path.name for path in (learned / "generations").glob("*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)
