"""The file of a bundle's budget tables, what makes a table doubtful, and the command that measures it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from redraft.bundle.budget_table import BudgetTable
from redraft.bundle.config import BundleConfig, bundle_ranks
from redraft.bundle.manifest import MANIFEST, file_sha256
from redraft.bundle.method import MethodConfig
from redraft.errors import BundleError, program

FILE_NAME = "budget.json"
LEAST_MEASURED = 0.6
"""The least share of its measurements that a table should rest on."""
BUSY_SHARE = 0.15
"""Load of other programs, as a share of all cores, that slows a bundle noticeably."""


class BudgetFile(BaseModel):
    """Written by `redraft tune` next to the engines: the tables of the methods that were tuned."""

    model_config = ConfigDict(extra="forbid")

    sha256: str = ""
    """Digest of the tables and of the bundle's manifest, so that they are whole and were measured on this build."""
    machine: str = ""
    """Where they were measured: see `machine_name`."""
    methods: dict[str, BudgetTable] = Field(default_factory=dict)

    @classmethod
    def load(cls, bundle: Path) -> BudgetFile:
        """A bundle's tables; none where it has not been tuned.

        Raises ValueError where the file is damaged, was edited, or belongs to another build.
        """
        path = bundle / FILE_NAME
        if not path.is_file():
            return cls()
        try:
            result = cls.model_validate_json(path.read_bytes())
        except ValidationError:
            raise ValueError(f"{path} is truncated or damaged, or of an older version: {how_to_tune(bundle)}") from None
        if result.sha256 != result.digest(bundle):
            raise ValueError(f"{path} was edited, or measured on another build: {how_to_tune(bundle)}")
        return result

    def tuned(self, methods: Mapping[str, MethodConfig]) -> dict[str, MethodConfig]:
        """A bundle's methods, with what their tables say of those that have been tuned."""
        return {name: method.tuned(self.methods.get(name)) for name, method in methods.items()}

    @property
    def doubtful(self) -> dict[str, BudgetTable]:
        """The tables that give reasons for doubts."""
        return {name: table for name, table in self.methods.items() if doubts(table)}

    def save(self, bundle: Path) -> None:
        """Write the tables into the bundle, whole or not at all. Raises BundleError where they cannot be written."""
        signed = self.model_copy(update={"sha256": self.digest(bundle), "machine": machine_name()})
        partial = bundle / f".{FILE_NAME}.partial"
        try:
            partial.write_text(signed.model_dump_json(indent=1) + "\n", encoding="utf-8")
            partial.replace(bundle / FILE_NAME)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise BundleError(f"cannot write {bundle / FILE_NAME}: {error.strerror}") from None

    def digest(self, bundle: Path) -> str:
        """sha256 of the tables and of the bundle's manifest."""
        tables = json.dumps(self.model_dump(mode="json")["methods"], sort_keys=True)
        return hashlib.sha256(f"{file_sha256(bundle / MANIFEST)} {tables}".encode()).hexdigest()


def machine_name() -> str:
    """This machine as budgets depend on it: its CPU's model and the cores that this process may use."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def how_to_tune(bundle: Path, minutes: int | None = None) -> str:
    """The command that measures a bundle's budgets, again where there are some, with as many ranks as it needs."""
    ranks = bundle_ranks(bundle)
    command = [program("redraft"), "tune", "--bundle", str(bundle)]
    command += ["--minutes", str(minutes)] if minutes else []
    launcher = [program("mpiexec"), "-n", str(ranks)] if ranks > 1 else []
    return f"run `{shlex.join([*launcher, *command])}`"


def doubts(table: BudgetTable) -> list[str]:
    """Why a table may draft less than pays: its minutes ended early, or the machine was busy. Empty for a sound one."""
    made, reasons = table.measured.get("measurements"), []
    if made and made["done"] < LEAST_MEASURED * made["of"]:
        reasons.append(f"there was time for {made['done']} of {made['of']} measurements")
        if unknown := table.measured.get("not_timed"):
            loads = ", ".join(map(str, unknown))
            reasons.append(f"{loads} running: not timed, so that as much is drafted as at the next larger load")
    for temperature, loads in table.measured.get("not_tried", {}).items():
        where = f"{', '.join(map(str, loads))} running at temperature {temperature}"
        reasons.append(f"{where}: no time to try what should pay, so that nothing is drafted")
    if (share := table.measured.get("other_load", 0.0)) >= BUSY_SHARE:
        reasons.append(f"other programs used {share:.0%} of the cores meanwhile, which makes rows look expensive")
    return reasons


def minutes_for_all(table: BudgetTable) -> int:
    """The minutes in which about all of a table's measurements would have been made."""
    made = table.measured.get("measurements", {"done": 1, "of": 1})
    return math.ceil(table.measured.get("minutes", 4) * made["of"] / max(made["done"], 1))


def untuned_warning(methods: Iterable[str], bundle: Path) -> str:
    """What to know of a bundle, some of whose methods have not been tuned."""
    return (
        f"not tuned: {', '.join(methods)}: as much is drafted however many requests run, which can be slower than no "
        f"drafting; {how_to_tune(bundle)}"
    )


def doubtful_warning(method: str, table: BudgetTable, bundle: Path) -> str:
    """What to know of a table with doubts."""
    return f"{method}: {'; '.join(doubts(table))}; on a quiet machine {how_to_tune(bundle, minutes_for_all(table))}"


def why_untuned(bundle: Path) -> str:
    """Which methods of a bundle are not tuned, or why its tables cannot be used; "" where all are."""
    try:
        tuned = BudgetFile.load(bundle).methods
        untuned = [name for name in BundleConfig.read(bundle).methods if name not in tuned]
    except (BundleError, OSError, ValueError) as error:
        return str(error)
    return f"{bundle} is not tuned: {', '.join(untuned)}" if untuned else ""
