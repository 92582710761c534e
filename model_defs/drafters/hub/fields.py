"""The fields of a drafter's `config.json`: their types, and which of them were read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, create_model

Count = Annotated[int, Field(ge=1, lt=2**31)]
Index = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]


NAMES: list[tuple[Any, str]] = [
    (str, "model_type speculators_model_type base_model_name_or_path name_or_path"),
    (str, "hidden_act rope_type type projector_type markov_head_type"),
    (list[str], "architectures layer_types"),
    (dict[str, Any], "dflash_config eagle_config transformer_layer_config speculators_config verifier"),
    (dict[str, Any], "rope_scaling rope_parameters"),
    (Count, "hidden_size target_hidden_size intermediate_size num_hidden_layers num_attention_heads"),
    (Count, "num_key_value_heads head_dim vocab_size draft_vocab_size max_position_embeddings rotary_dim rope_dim"),
    (Count, "original_max_position_embeddings block_size num_target_layers num_draft_layers exit_dim"),
    (Index, "sliding_window parallel_draft_step mask_token_id markov_rank"),
    (list[Index], "eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids target_layer_ids layer_ids"),
    (Positive, "rms_norm_eps rope_theta factor low_freq_factor high_freq_factor partial_rotary_factor"),
    (Positive, "attention_factor beta_fast beta_slow"),
    (float, "mscale mscale_all_dim"),
    (list[Positive], "short_factor long_factor"),
    (bool, "use_sliding_window truncate is_causal causal sliding_window_non_causal is_neox_style rnn"),
    (bool, "norm_before_residual norm_before_fc fc_norm norm_output return_hidden_post_norm tie_word_embeddings"),
    (bool, "use_aux_hidden_state use_input_layernorm_in_first_layer use_last_layernorm use_mtp_layernorm"),
    (bool, "next_layer_regular sample_from_anchor dspark_bonus_anchor shift_label"),
]
"""The types of the fields that are read, in whichever object they stand"""
STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
ABSENT_AS_NULL: dict[str, Any] = {name: (kind | None, None) for kind, names in NAMES for name in names.split()}
Types = create_model("Types", __config__=STRICT, **ABSENT_AS_NULL)


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
        """Raise ValueError for a field of `NAMES`, here or in an object within it, whose value is of another type."""
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
