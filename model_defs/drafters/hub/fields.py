"""The fields of a drafter's `config.json`: their types, and which of them were read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=1, lt=2**31)]
Index = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]


class Fields(dict[str, Any]):
    """A JSON object of `config.json` that knows which of its fields were read, in objects within it too."""

    def __init__(self, values: Mapping[str, Any], file: Path, prefix: str = ""):
        """prefix: what stands before a field's name in messages."""
        super().__init__(
            {
                name: Fields(value, file, f"{prefix}{name}.") if isinstance(value, dict) else value
                for name, value in values.items()
            }
        )
        self.file, self.prefix = file, prefix
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        """Raises ValueError for a field that is not there."""
        self._read.add(name)
        if name not in self:
            raise ValueError(f"{self.file} does not say {self.prefix}{name}, which this form needs")
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return super().get(name, default)

    def part(self, name: str) -> Fields:
        """An object within it, an empty one where there is none."""
        part = self.get(name)
        return part if isinstance(part, Fields) else Fields({}, self.file, f"{self.prefix}{name}.")

    def unread(self) -> Iterator[tuple[str, str, Any]]:
        """The fields that were not read and say anything: name with those of the objects around it, own name, value."""
        for name, value in self.items():
            if name not in self._read and value not in (None, {}, []):
                yield f"{self.prefix}{name}", name, value
            elif isinstance(value, Fields):
                yield from value.unread()

    def fresh(self, without: set[str]) -> Fields:
        """The same, of which nothing was read, without the fields of these names."""

        def kept(fields: Fields) -> dict[str, Any]:
            return {
                name: kept(value) if isinstance(value, Fields) else value
                for name, value in fields.items()
                if f"{fields.prefix}{name}" not in without
            }

        return Fields(kept(self), self.file, self.prefix)

    def names(self) -> set[str]:
        """The names of all fields, with those of the objects around them."""
        parts = [value for value in self.values() if isinstance(value, Fields)]
        return {f"{self.prefix}{name}" for name in self}.union(*(part.names() for part in parts))

    def check_types(self) -> None:
        """Raise ValueError for a field of `Types`, here or in an object within it, whose value is of another type."""
        try:
            Types.model_validate(dict(self))
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"[{part}]" if isinstance(part, int) else str(part) for part in first["loc"])
            says = f"{self.file} says {self.prefix}{where} {first['input']!r}"
            raise ValueError(f"{says}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
        for value in self.values():
            if isinstance(value, Fields):
                value.check_types()


class Types(BaseModel):
    """The types of the fields that are read, in whichever object they stand. null is as good as absent."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    architectures: list[str] | None = None
    model_type: str | None = None
    speculators_model_type: str | None = None
    base_model_name_or_path: str | None = None
    name_or_path: str | None = None
    dflash_config: dict[str, Any] | None = None
    eagle_config: dict[str, Any] | None = None
    transformer_layer_config: dict[str, Any] | None = None
    speculators_config: dict[str, Any] | None = None
    verifier: dict[str, Any] | None = None

    hidden_size: Count | None = None
    target_hidden_size: Count | None = None
    intermediate_size: Count | None = None
    num_hidden_layers: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    vocab_size: Count | None = None
    draft_vocab_size: Count | None = None
    max_position_embeddings: Count | None = None
    rms_norm_eps: Positive | None = None
    hidden_act: str | None = None
    layer_types: list[str] | None = None
    sliding_window: Index | None = None
    use_sliding_window: bool | None = None
    rotary_dim: Count | None = None
    rope_dim: Count | None = None

    rope_theta: Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    partial_rotary_factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None

    eagle_aux_hidden_state_layer_ids: list[Index] | None = None
    aux_hidden_state_layer_ids: list[Index] | None = None
    target_layer_ids: list[Index] | None = None
    layer_ids: list[Index] | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    return_hidden_post_norm: bool | None = None
    tie_word_embeddings: bool | None = None
    use_aux_hidden_state: bool | None = None
    use_input_layernorm_in_first_layer: bool | None = None
    use_last_layernorm: bool | None = None
    use_mtp_layernorm: bool | None = None
    next_layer_regular: bool | None = None
    parallel_draft_step: Index | None = None

    block_size: Count | None = None
    mask_token_id: Index | None = None
    num_target_layers: Count | None = None
    projector_type: str | None = None
    markov_rank: Index | None = None
    markov_head_type: str | None = None
    sample_from_anchor: bool | None = None
    dspark_bonus_anchor: bool | None = None
    shift_label: bool | None = None
    sliding_window_non_causal: bool | None = None
    is_causal: bool | None = None
    causal: bool | None = None
    is_neox_style: bool | None = None

    num_draft_layers: Count | None = None
    exit_dim: Count | None = None
    rnn: bool | None = None
