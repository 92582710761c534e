"""EAGLE-3 drafters in the `speculators` package, of the same checkpoint as ours: do both compute the same?

The package has an environment of its own:

    python3.11 -m venv VENV && VENV/bin/pip install torch==2.13.0 speculators==0.9.0 -e .
    VENV/bin/python -m benchmarks.verify.speculators_forward

Random drafters of a small random Llama are exported to the package's form, loaded by it and by our reader, and unrolled
along a text. It prints the largest difference of the logits at each depth, over the largest logit, and fails above
1e-4.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from compiler.checkpoints.eagle3 import Form, export_eagle3
from model_defs.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from model_defs.drafters.layer_shape import LayerShape
from model_defs.drafters.registry import load_drafter
from model_defs.drafters.windows import Windows
from model_defs.target.model import Target

SIZE, VOCAB, ROWS, LAYERS = 24, 111, 53, (2, 3, 5)
POSITIONS, DEPTHS, MOST = 14, 3, 1e-4
VARIANTS: dict[str, dict] = {
    "EAGLE-3": {},
    "two layers, EAGLE-3.1": {"num_layers": 2, "fuse_norm": "each", "norm_output": True},
    "norm before fc, residual after the norm": {"fuse_norm": "all", "norm_before_residual": True},
}


def write_target(folder: Path) -> Target:
    """A random Llama of 7 layers."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=40,
        num_hidden_layers=7,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return Target.from_folder(folder)


def random_drafter(target: Target, changes: dict) -> Eagle3Drafter:
    config = Eagle3Config(SIZE, VOCAB, ROWS, LAYERS, layer=LayerShape.of(target.config), **changes)
    drafter = Eagle3Drafter(config, target, torch.randperm(VOCAB)[:ROWS]).eval()
    for weight in drafter.parameters():
        weight.requires_grad_(False).normal_(0, 0.3 if weight.ndim == 2 else 1)
    return drafter


def theirs(folder: Path, windows: Windows) -> Iterator[Tensor]:
    """Logits [positions, rows] at each depth."""
    from speculators.models.eagle3.core import Eagle3DraftModel  # type: ignore[import-not-found]

    config = Eagle3DraftModel.config_class.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(str(folder), config=config, dtype=torch.float32).eval()
    found: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0, :POSITIONS]))
    length = POSITIONS + DEPTHS - 1
    model(
        hidden_states=windows.layers[:, :length].clone(),  # type: ignore[index]
        input_ids=windows.tokens[:, 1 : length + 1],
        document_ids=torch.zeros(1, length, dtype=torch.long),
        ttt_steps=DEPTHS,
    )
    yield from found


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    length, worst = POSITIONS + DEPTHS + 1, 0.0
    windows = Windows(
        torch.randint(VOCAB, (1, length)),
        torch.zeros(1, length, SIZE),
        torch.zeros(1, length, dtype=torch.long),
        torch.arange(POSITIONS)[None],
        torch.ones(1, POSITIONS, dtype=torch.bool),
        torch.randn(1, length, len(LAYERS) * SIZE),
    )
    with tempfile.TemporaryDirectory() as folder:
        model, exported = Path(folder) / "model", Path(folder) / "drafter"
        target = write_target(model)
        for name, changes in VARIANTS.items():
            export_eagle3(random_drafter(target, changes), model, exported, Form.speculators, str(model), DEPTHS)
            ours = load_drafter(exported, target)
            states = ours.unroll(windows, [POSITIONS] * DEPTHS)
            for depth, (x, logits) in enumerate(zip(states, theirs(exported, windows), strict=True)):
                difference = float((x @ ours.head_weight.T - logits).abs().max() / logits.abs().max())
                print(f"{name}, depth {depth}: {difference:.1e}")
                worst = max(worst, difference)
    sys.exit(worst > MOST)


if __name__ == "__main__":
    main()
