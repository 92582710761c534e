"""Language models within checkpoints that take images too: Gemma 3 of 4B and more, Mistral Small 3.1 and 3.2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redraft.compiler.checkpoints.source import FetchError
from redraft.model_defs.files import read_json
from redraft.model_defs.target.errors import UnsupportedModelError
from redraft.model_defs.target.families.registry import FAMILIES, SUPPORTED

WRAPPERS = ("gemma3", "mistral3")
"""The wrappers' `model_type`s"""
OUTSIDE = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings")
"""What a wrapper's configuration says of the language model beside `text_config`"""


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`; of a wrapper, what it says of the language model, with transformers' values for what it
    leaves out. Raises as `read_json` does, or UnsupportedModelError for a wrapper around an unknown language model."""
    raw = read_json(folder / "config.json")
    if (wrapper := raw.get("model_type")) not in WRAPPERS:
        return raw
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    whole: Any = CONFIG_MAPPING[wrapper]
    try:
        text = whole(text_config=raw.get("text_config")).get_text_config().to_dict()
    except Exception as error:  # transformers raises what it likes for fields of a wrong type
        raise FetchError(f"{folder / 'config.json'}: text_config: {' '.join(str(error).split())}") from None
    if (kind := text["model_type"]) not in FAMILIES:
        raise UnsupportedModelError(f"a language model of model_type {kind!r} within {wrapper!r}", SUPPORTED)
    said = {name: raw[name] for name in OUTSIDE if raw.get(name) is not None}
    return text | said | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]}
