"""What the fields of a GGUF file say of a model."""

from __future__ import annotations

import pytest
import torch

from compiler.checkpoints.gguf_config import hf_config
from model_defs.target.config import TargetConfig
from model_defs.target.families.registry import FAMILIES

FIELDS = {
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}


@pytest.mark.parametrize(("more", "betas"), [({}, (32, 1)), ({"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}, (16, 2))])
def test_yarn_is_read_with_the_bounds_of_its_ramp(more, betas):
    own = FIELDS | {f"rope.scaling.{name}": value for name, value in more.items()}
    fields = {f"qwen2.{name}": value for name, value in own.items()}
    tensors = {"token_embd.weight": torch.empty(111, 64, device="meta")}
    config = TargetConfig.from_hf(hf_config(FAMILIES["qwen2"], fields, tensors))
    assert (config.rope.type, config.rope.factor, config.max_position) == ("yarn", 4.0, 512)
    assert (config.rope.beta_fast, config.rope.beta_slow) == betas


@pytest.mark.parametrize(
    ("texts", "named", "ends"),
    [
        (["a", "<eos>", "<end_of_turn>"], {"eos": 1}, [1, 2]),
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos": 2, "unknown": 0}, [2]),
        (["<|endoftext|>", "a", "<|end|>"], {"eos": 0, "unknown": 0}, [0, 2]),
        (["a", "</s>", "<turn>", "<message>"], {"eos": 1, "eot": 2, "eom": 3}, [1, 2, 3]),
        (["a", "</s>"], {}, None),
    ],
    ids=["Gemma 3", "SmolLM2", "Phi-4-mini", "named", "none"],
)
def test_ends_are_what_the_file_names_and_what_is_called_one(texts, named, ends):
    fields = {f"llama.{name}": value for name, value in FIELDS.items()} | {"tokenizer.ggml.tokens": texts}
    fields |= {f"tokenizer.ggml.{kind}_token_id": token for kind, token in named.items()}
    tensors = {"token_embd.weight": torch.empty(111, 64, device="meta")}
    assert hf_config(FAMILIES["llama"], fields, tensors)["eos_token_id"] == ends
