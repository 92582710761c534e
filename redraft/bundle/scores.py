"""How nodes are scored: the numbers that `redraft tune` fits, and their file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from redraft.bundle.folder import MANIFEST
from redraft.bundle.manifest import file_sha256
from redraft.bundle.method import MethodConfig
from redraft.decoding.scores import NgramScores, Scores
from redraft.errors import BundleError
from redraft.whole_file import whole_file

FILE_NAME = "scores.json"


class MethodScores(BaseModel):
    """What was fitted to a method."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: tuple[Scores, ...]
    """By temperature"""
    ngrams: NgramScores = NgramScores()

    @field_validator("nodes")
    @classmethod
    def _from_greedy_on(cls, nodes: tuple[Scores, ...]) -> tuple[Scores, ...]:
        if all(scores.temperature for scores in nodes):
            raise ValueError("expected one of temperature 0")
        return nodes


class ScoresFile(BaseModel):
    """Written by `redraft tune` next to the engines: the scores of the methods that were fitted."""

    model_config = ConfigDict(extra="forbid")

    sha256: str = ""
    """Digest of the scores and of the bundle's manifest, so that they are whole and were fitted to this build."""
    methods: dict[str, MethodScores] = Field(default_factory=dict)

    @classmethod
    def load(cls, bundle: Path) -> ScoresFile:
        """A bundle's scores; none where none were fitted.

        Raises ValueError where the file is damaged, was edited, or belongs to another build.
        """
        path = bundle / FILE_NAME
        if not path.is_file():
            return cls()
        again = "remove it, or fit anew with `redraft tune`"
        try:
            result = cls.model_validate_json(path.read_bytes())
        except ValidationError:
            raise ValueError(f"{path} is truncated or damaged: {again}") from None
        if result.sha256 != result.digest(bundle):
            raise ValueError(f"{path} was edited, or fitted to another build: {again}")
        return result

    def fitted(self, methods: dict[str, MethodConfig]) -> dict[str, MethodConfig]:
        """A bundle's methods, with the scores of those that have been fitted."""
        return methods | {
            name: methods[name].changed(scores=scores.nodes, ngram_scores=scores.ngrams)
            for name, scores in self.methods.items()
            if name in methods
        }

    def save(self, bundle: Path) -> None:
        """Write the scores into the bundle, whole or not at all. Raises BundleError where they cannot be written."""
        signed = self.model_copy(update={"sha256": self.digest(bundle)})
        try:
            with whole_file(bundle / FILE_NAME) as file:
                file.write_text(signed.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BundleError(f"cannot write {bundle / FILE_NAME}: {error.strerror}") from None

    def digest(self, bundle: Path) -> str:
        """sha256 of the scores and of the bundle's manifest."""
        scores = json.dumps(self.model_dump(mode="json")["methods"], sort_keys=True)
        return hashlib.sha256(f"{file_sha256(bundle / MANIFEST)} {scores}".encode()).hexdigest()
