"""Gemma 3 and Mistral 3 with vision: their language models are fetched."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from redraft.compiler.checkpoints.wrapped import read_config
from redraft.model_defs.files import SINGLE
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target
from tests.compiler.checkpoints.tiny_llama import fetch
from tests.model_defs.target.references import VOCAB, write_reference


@pytest.mark.parametrize(
    ("wrapper", "within", "family"), [("gemma3", "gemma3", "gemma3_text"), ("mistral3", "mistral", "mistral")]
)
@torch.no_grad()
def test_the_language_model_within_is_fetched(checkpoint, tmp_path, wrapper, within, family):
    """Beside weights that see."""
    source = tmp_path / "vision"
    reference = write_reference(within, source)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(checkpoint / file, source)
    config = {"model_type": wrapper, "text_config": reference.config.to_dict(), "eos_token_id": [1, 106]}
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").unlink()
    weights = {f"language_model.{name}": weight for name, weight in load_file(source / SINGLE).items()}
    save_file(weights | {"vision_tower.post_layernorm.weight": torch.ones(8)}, source / SINGLE)
    target = Target.from_folder(fetch(source, tmp_path))
    assert (target.config.family, target.config.eos_token_ids) == (family, (1, 106))
    for weight in reference.parameters():
        weight.copy_(weight.bfloat16())
    ids = torch.randint(0, VOCAB, (2, 30))
    want = reference(ids).logits
    found = target.lm_head(target(ids, causal_attend(target.config, 30)).hidden)
    torch.testing.assert_close(found, want, atol=1e-4 * float(want.abs().max()), rtol=0)


def test_what_a_wrapper_leaves_out_is_what_transformers_takes(tmp_path):
    """As the 4B model says it."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    config = TargetConfig.from_hf(read_config(tmp_path))
    assert (config.num_heads, config.num_kv_heads, config.head_size, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.rope.type, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1e6)
    assert config.max_position == 131072
    assert config.others is not None
    assert (config.others.window, config.others.rope.theta, len(config.others.layers)) == (1024, 1e4, 29)
