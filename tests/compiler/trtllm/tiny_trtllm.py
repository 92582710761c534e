"""A tiny target, drafters for it, and the export command, for the tests of the TensorRT-LLM export."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from redraft.cli.export import app
from redraft.model_defs.drafters.recurrent import RecurrentConfig, RecurrentDrafter
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target

VOCAB, HIDDEN, INTER, LAYERS, HEADS, SIZE = 120, 48, 96, 2, 12, 8


def run(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def export(model: Path, drafter: Path, output: Path, *flags: object) -> Path:
    done = run("trtllm", "--model", model, "--drafter", drafter, "--output", output, *flags)
    assert done.exit_code == 0, done.output
    return output


def refusal(*arguments: object) -> str:
    """The message of a command that must fail, on one line."""
    done = run(*arguments)
    assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.output
    return " ".join(done.output.split())


def make_target(folder: Path, kv_heads: int = 3, qwen: bool = False, **changes) -> Path:
    """A random checkpoint in Hugging Face's form; its query heads are wider together than the hidden state."""
    torch.manual_seed(kv_heads)
    shapes = {"q": HEADS, "k": kv_heads, "v": kv_heads}
    weights = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "model.norm.weight": torch.rand(HIDDEN)}
    if not changes.get("tie_word_embeddings"):
        weights["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    for i in range(LAYERS):
        for name, heads in shapes.items():
            weights[f"model.layers.{i}.self_attn.{name}_proj.weight"] = torch.randn(heads * SIZE, HIDDEN)
            if qwen:
                weights[f"model.layers.{i}.self_attn.{name}_proj.bias"] = torch.randn(heads * SIZE)
        weights[f"model.layers.{i}.self_attn.o_proj.weight"] = torch.randn(HIDDEN, HEADS * SIZE)
        for name in ("gate", "up"):
            weights[f"model.layers.{i}.mlp.{name}_proj.weight"] = torch.randn(INTER, HIDDEN)
        weights[f"model.layers.{i}.mlp.down_proj.weight"] = torch.randn(HIDDEN, INTER)
        for name in ("input", "post_attention"):
            weights[f"model.layers.{i}.{name}_layernorm.weight"] = torch.rand(HIDDEN)
    folder.mkdir()
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors")
    config = {
        "model_type": "qwen2" if qwen else "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INTER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": SIZE,
        "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    return folder


def make_apple(folder: Path, exit_dim: int = 60) -> Path:
    """A random drafter in Apple's form, in bfloat16."""
    torch.manual_seed(exit_dim)
    shapes = {
        "rnn_u.weight": (HIDDEN, HIDDEN),
        "rnn_u.bias": (HIDDEN,),
        "rnn_w.weight": (HIDDEN, HIDDEN),
        "lm_head.2.weight": (VOCAB, exit_dim),
    }
    for i in range(2):
        shapes |= {f"lm_head.{i}.linear.weight": (exit_dim, exit_dim), f"lm_head.{i}.linear.bias": (exit_dim,)}
    if exit_dim != 2 * HIDDEN:
        shapes |= {"input_proj.weight": (exit_dim, 2 * HIDDEN), "input_proj.bias": (exit_dim,)}
    folder.mkdir()
    weights = {name: (0.2 * torch.randn(shape)).bfloat16() for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    config = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "exit_dim": exit_dim, "num_draft_layers": 2, "rnn": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_own(folder: Path, model: Path, hot: int | None = 37, **changes) -> Path:
    """A random drafter in our form, for a target."""
    target = Target.from_folder(model)
    settings = {"exit_dim": 60, "num_blocks": 2, "initial_state": "zero", "hot_vocabulary": hot}
    torch.manual_seed(7)
    ids = torch.randperm(VOCAB)[:hot] if hot else None
    drafter = RecurrentDrafter(RecurrentConfig(HIDDEN, VOCAB, **settings | changes), target, ids)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    drafter.save(folder, {"target_fingerprint": target_fingerprint(target)})
    return folder


DRAFTERS = {
    "apple": lambda folder, model: make_apple(folder),
    "apple, exit_dim 2H": lambda folder, model: make_apple(folder, 2 * HIDDEN),
    "ours, all tokens": lambda folder, model: make_own(folder, model, None),
    "ours, every token hot": lambda folder, model: make_own(folder, model, VOCAB),
    "ours, hot vocabulary": make_own,
    "ours, hot vocabulary, exit_dim 2H": lambda folder, model: make_own(folder, model, exit_dim=2 * HIDDEN),
    "ours, exit_dim 2H": lambda folder, model: make_own(folder, model, None, exit_dim=2 * HIDDEN),
    "ours, exit_dim 2H - 1": lambda folder, model: make_own(folder, model, exit_dim=2 * HIDDEN - 1),
    "ours, own head": lambda folder, model: make_own(folder, model, head="own", rnn_bias=False),
}
"""What makes each kind of drafter in a folder, for a target's folder."""
