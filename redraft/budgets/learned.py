"""The file of what was learned: a bundle's estimates on one machine, for the next start."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from redraft.budgets.controller import Estimates
from redraft.bundle.machine import machine_name
from redraft.bundle.manifest import MANIFEST, file_sha256

log = logging.getLogger("redraft.budgets")


class Learned(BaseModel):
    """A file's content. Machines that share a bundle have a file each."""

    model_config = ConfigDict(extra="forbid")

    machine: str
    """See `machine_name`."""
    build: str
    """sha256 of the bundle's manifest."""
    estimates: Estimates

    @staticmethod
    def path(bundle: Path) -> Path:
        """This machine's file in a bundle."""
        return bundle / f"learned.{hashlib.sha256(machine_name().encode()).hexdigest()[:12]}.json"

    @classmethod
    def load(cls, bundle: Path) -> Estimates | None:
        """What was learned of a bundle on this machine; None where nothing was. A file that is damaged, or of another
        build or machine, counts for nothing, which is logged."""
        path = cls.path(bundle)
        if not path.is_file():
            return None
        try:
            learned = cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            log.warning("%s is damaged or of another version: learning anew", path)
            return None
        if (learned.machine, learned.build) != (machine_name(), file_sha256(bundle / MANIFEST)):
            log.warning("%s was learned on another build or machine: learning anew", path)
            return None
        return learned.estimates

    @classmethod
    def save(cls, bundle: Path, estimates: Estimates) -> None:
        """Write what was learned, whole or not at all. A folder that cannot be written to is logged."""
        path = cls.path(bundle)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            content = cls(machine=machine_name(), build=file_sha256(bundle / MANIFEST), estimates=estimates)
            partial.write_text(content.model_dump_json() + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            log.warning("cannot keep what was learned in %s: %s", path, error.strerror)
