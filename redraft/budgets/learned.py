"""The file of what was learned: the estimates of a bundle on one machine, for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from redraft.budgets.controller import Estimates
from redraft.bundle.machine import machine_name
from redraft.bundle.scores import ScoresFile
from redraft.whole_file import remove_stale, whole_file

log = logging.getLogger("redraft.budgets")


class Learned(BaseModel):
    """A file's content."""

    model_config = ConfigDict(extra="forbid")

    machine: str
    """See `LearnedFile.machine`."""
    build: str
    """See `LearnedFile.build`."""
    estimates: Estimates


@dataclass(frozen=True)
class LearnedFile:
    """The file of a bundle's build on one machine: machines that share a folder have a file each."""

    folder: Path
    machine: str
    """See `machine_name`, the GPU, and the threads of the engine."""
    build: str
    """See `ScoresFile.digest`, of the bundle as it was loaded: another build may have taken the folder since."""

    @classmethod
    def of(
        cls, bundle: Path, threads: int | None = None, gpu: str | None = None, folder: Path | None = None
    ) -> LearnedFile:
        """The file of a bundle that is served on this GPU, None: on the CPU, with `threads` threads, by default one for
        each core. It lies in `folder`, by default beside the bundle's files. Raises ValueError for damaged scores."""
        parts = (machine_name(), gpu, f"{threads} threads" if threads else None)
        return cls(folder or bundle, ", ".join(filter(None, parts)), ScoresFile.load(bundle).digest(bundle))

    @property
    def path(self) -> Path:
        """Where it lies: bundles may share a folder."""
        digest = hashlib.sha256(f"{self.machine} {self.build}".encode())
        return self.folder / f"learned.{digest.hexdigest()[:12]}.json"

    def load(self) -> Estimates | None:
        """Return what was learned; None where nothing was. A file that is damaged, or was renamed to that of
        another build or machine, counts for nothing, which is logged."""
        try:
            learned = Learned.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("cannot read %s: %s: learning anew", self.path, error.strerror)
            return None
        except ValidationError:
            log.warning("%s is damaged or of another version: learning anew", self.path)
            return None
        if (learned.machine, learned.build) != (self.machine, self.build):
            log.warning("%s was learned on another build or machine: learning anew", self.path)
            return None
        return learned.estimates

    def save(self, estimates: Estimates) -> None:
        """Write what was learned, whole or not at all, unless another service of the bundle has learned of more steps
        and written it. A folder that cannot be written to is logged: bundles may lie on a file system that is read
        only."""
        with suppress(OSError, ValidationError):  # what cannot be read is replaced
            kept = Learned.model_validate_json(self.path.read_bytes())
            same = (kept.machine, kept.build) == (self.machine, self.build)
            if same and kept.estimates.costs.steps > estimates.costs.steps:
                return
        content = Learned(machine=self.machine, build=self.build, estimates=estimates)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as file:
                file.write_text(content.model_dump_json() + "\n", encoding="utf-8")
        except OSError as error:
            log.warning(
                "cannot keep what was learned in %s: %s; --learned-dir names another folder", self.path, error.strerror
            )

    def remove_outdated(self) -> None:
        """Remove what no start of the folder's only bundle will read again: files of its older builds, and what killed
        writers have left."""
        with suppress(OSError):  # where the folder cannot be written to
            for path in self.folder.glob("learned.*.json"):
                if _build_of(path) != self.build:
                    path.unlink()
            remove_stale(self.folder, ".learned.*.partial")


def _build_of(path: Path) -> str | None:
    """The build that a file was learned on, None for one that says none."""
    try:
        return str(json.loads(path.read_bytes())["build"])
    except (ValueError, LookupError, TypeError):
        return None
