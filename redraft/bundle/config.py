"""A bundle's `config.json`: its target, limits and methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from redraft.bundle.backends import Backend, Form, Precision, backend_of
from redraft.bundle.folder import CONFIG
from redraft.bundle.method import MethodConfig
from redraft.errors import BundleError, how_to_rebuild

FORMAT_VERSION = 3
METHOD_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
"""What a method may be called: it is part of file names."""

BackendField = Annotated[InstanceOf[Backend], BeforeValidator(backend_of), PlainSerializer(str)]
"""A backend's record, which stands in JSON as its name."""


class Section(BaseModel):
    """A part of a JSON file of a bundle: no unknown fields, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetInfo(Section):
    """The target's shape, as far as the run time needs it."""

    num_layers: int
    hidden_size: int
    feature_size: int
    """Width of the target's output `features`, which drafters read"""
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_position: int
    windowed_layers: tuple[int, ...] = ()
    """The layers with a sliding window"""
    tie_embeddings: bool = True
    """Whether the LM head is the embedding table."""
    unknown_tokens: tuple[tuple[int, int], ...] = ()
    """Ids that the tokenizer does not know, since the vocabulary is padded, as ranges [first, end). They are never
    sampled."""


class ShardInfo(Section):
    """What a rank of a tensor-parallel target has: KV heads of each layer, and columns of the logits."""

    num_kv_heads: int = Field(ge=1)
    vocab_size: int = Field(ge=1)


class LimitsInfo(Section):
    """Sizes that are compiled in: `slots` sequences of at most `max_len` tokens, `max_tree` rows of a tree (its
    root included), and `prefill_chunk` prompt rows a step.

    `window_rows`: rows of a slot in the target's caches of layers with a window, the longest of which is `window`; 0:
    as many as in the others. Place p of a text has row p % window_rows.
    """

    slots: int = Field(ge=1)
    max_len: int = Field(ge=2)
    max_tree: int = Field(ge=1)
    prefill_chunk: int = Field(ge=1)
    window: int = Field(default=0, ge=0)
    window_rows: int = Field(default=0, ge=0)


class BundleConfig(Section):
    """`config.json`. The first of the methods serves requests that name none; without any it decodes
    auto-regressively."""

    format_version: int = FORMAT_VERSION
    name: str
    backend: BackendField
    precision: Precision
    target: TargetInfo
    limits: LimitsInfo
    methods: dict[Annotated[str, Field(pattern=METHOD_NAME)], MethodConfig]
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that execute the target together: see `target_folder`."""
    shards: tuple[ShardInfo, ...] = ()
    """One per rank, where there are several."""
    form: Form | None = None
    """The target's form in engines of TensorRT."""
    alias: bool = False
    """Whether the plugins declare that they update caches in place, to a compiler that may copy for it."""

    @model_validator(mode="after")
    def _one_shard_for_each_rank(self) -> Self:
        expected = self.tensor_parallel if self.tensor_parallel > 1 else 0
        if len(self.shards) != expected:
            raise ValueError(f"{len(self.shards)} shards for {self.tensor_parallel} ranks: expected {expected}")
        return self

    @classmethod
    def read(cls, bundle: Path, rebuild: str = how_to_rebuild()) -> BundleConfig:
        """A bundle's `config.json`. Raises BundleError, which says how to `rebuild` it."""
        try:
            return cls.model_validate(read_json_object(bundle / CONFIG))
        except ValidationError as error:
            raise BundleError(f"{bundle / CONFIG} is invalid: {first_problem(error)}; {rebuild}") from None

    @property
    def plugin_form(self) -> bool:
        """Whether a target for TensorRT is in plugin form."""
        return Form.plugin in self.backend.forms and self.form != Form.native

    def cache_rows(self, layer: int) -> int:
        """Rows of a slot in the target's caches of a layer."""
        limits = self.limits
        if limits.window_rows and layer in self.target.windowed_layers:
            return min(limits.window_rows, limits.max_len + limits.max_tree)
        return limits.max_len + limits.max_tree

    def kv_heads(self, rank: int) -> int:
        """KV heads of the target's cache on this rank."""
        return self.shards[rank].num_kv_heads if self.shards else self.target.num_kv_heads


def target_folder(bundle: Path, rank: int, ranks: int) -> Path:
    """Where the networks and weights of a rank's part of the target are."""
    return bundle / f"rank{rank}" if ranks > 1 else bundle


def read_json_object(path: Path) -> dict:
    """The JSON object in a file of a bundle. Raises BundleError."""
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise BundleError(f"{path} cannot be read ({error}); {how_to_rebuild()}") from None
    if not isinstance(raw, dict):
        raise BundleError(f"{path} is no JSON object; {how_to_rebuild()}")
    return raw


def first_problem(error: ValidationError) -> str:
    """The first problem of a pydantic error in one line."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
