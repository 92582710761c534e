"""A model's own defaults of sampling: `generation_config.json`, as its authors publish it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from redraft.bundle.config import first_problem, read_json_object
from redraft.errors import BundleError
from redraft.request import INT32_MAX, MAX_PENALTY, TopK

GENERATION_CONFIG = "generation_config.json"
Share = Annotated[FiniteFloat, Field(ge=0, le=1)]


class GenerationConfig(BaseModel):
    """What requests are sampled with where they say nothing else, and the most tokens of any answer; the file's other
    fields are not read. Without the file all are None."""

    model_config = ConfigDict(frozen=True)

    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=1 / MAX_PENALTY, le=MAX_PENALTY)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """That of a model's folder or a bundle. Raises BundleError for values that no request may have."""
        path = folder / GENERATION_CONFIG
        try:
            return cls.model_validate(read_json_object(path)) if path.is_file() else cls()
        except ValidationError as error:
            raise BundleError(f"{path}: {first_problem(error)}") from None
