"""Samplers that other servers have and this one does not, and what turns them off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EMPTY: tuple[Any, ...] = (False, "", [], {})
"""Values of fields that are not served which ask for nothing, but for false where true does. A null field is an absent
one anyway."""

SAMPLERS: dict[str, tuple[Any, ...]] = {
    "adaptive_target": (-1,),
    "ban_eos_token": (),
    "cfg_scale": (1,),
    "diversity_penalty": (0,),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynamic_temperature": (),
    "dynatemp_max": (0,),
    "dynatemp_min": (0,),
    "dynatemp_range": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "no_repeat_ngram_size": (0,),
    "nsigma": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "repeat_penalty": (1,),
    "sampler_order": (),
    "sampler_priority": (),
    "samplers": (),
    "skew": (0,),
    "smoothing_factor": (0,),
    "temperature_last": (),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "typical": (1,),
    "typical_p": (1,),
    "use_beam_search": (),
    "watermark": (),
    "xtc_probability": (0,),
}
"""Fields of llama.cpp, text-generation-webui, KoboldCpp, Aphrodite, TGI, vLLM and transformers, each with the values,
beside `EMPTY`, with which it has no effect."""
PENALTIES = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
"""Penalties, each with the value that turns it off."""
PENALIZED: dict[str, tuple[Any, ...]] = {
    "penalize_nl": (True,),
    "repeat_last_n": (-1,),
    "repetition_penalty_range": (-1,),
}
"""Which tokens penalties count: here all of them. Without a penalty any value has no effect."""

SAMPLER_SETTINGS = frozenset(
    {
        *("adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_range"),
        *("dry_sequence_breakers", "dynatemp_exponent", "dynatemp_high", "dynatemp_low", "early_stopping"),
        *("length_penalty", "mirostat_eta", "mirostat_tau", "smoothing_curve", "xtc_threshold"),
    }
)
"""What a sampler that is turned off does not look at, whatever the value."""


def asks_for_nothing(value: Any, neutral: tuple[Any, ...] = ()) -> bool:
    """Whether the value of a field that is not served is one of the `neutral` ones, or empty, in that the fields of an
    object may be null."""
    if isinstance(value, dict):
        value = {name: part for name, part in value.items() if part is not None}
    if value is False and any(item is True for item in neutral):
        return any(item is False for item in neutral)
    return any(value == item and isinstance(value, bool) is isinstance(item, bool) for item in (*EMPTY, *neutral))


def penalized(fields: Mapping[str, Any]) -> bool:
    """Whether a request has a penalty."""
    return any(fields.get(name) not in (None, off) for name, off in PENALTIES.items())


def turned_off(field: str, value: Any, penalties: bool) -> bool:
    """Whether a field sets only samplers that this server does not need to have, in a request with `penalties` or
    without."""
    if field in PENALIZED:
        return not penalties or (value in PENALIZED[field] and isinstance(value, bool) is (field == "penalize_nl"))
    return field in SAMPLER_SETTINGS or (field in SAMPLERS and asks_for_nothing(value, SAMPLERS[field]))
