"""From prompts to a drafter on a tiny random target: files, resuming, and a drafter that learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from model_defs.attention import causal_attend
from model_defs.config import RopeConfig, TargetConfig
from model_defs.target import Target

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build"))

import distill  # noqa: E402
import train_drafter  # noqa: E402

VOCAB, END = 111, 2


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = TargetConfig(VOCAB, 32, 48, 2, 4, 2, 8, 1e-5, RopeConfig(), 256, True, False, (END,))
    target = Target(config).eval().requires_grad_(False)
    target.embedding.weight.mul_(3)
    return target


def generate(target: Target, count: int, prompts: list[list[int]], slots: int = 3) -> list[distill.Document]:
    prefix = [7, 8, 9]
    docs = (
        distill.Document(distill.deque(prompts[i % len(prompts)]), 0.0, answer_start=3 + len(prompts[i % len(prompts)]))
        for i in range(10_000)
    )
    stream = distill.Generator(distill.TorchForward(target, slots, 64), {END}, prefix, seed=0).run(docs, 20, [END, 5])
    return [next(stream) for _ in range(count)]


@torch.no_grad()
def test_batched_generation_equals_the_target_alone(target):
    """Slots that start and end at different times leave no trace in each other's cache."""
    for doc in generate(target, 12, [[11, 12, 13, 14], [21], [31, 32]]):
        ids = torch.tensor([doc.tokens])
        hidden = target(ids, causal_attend(target.config, len(doc.tokens)))[0]
        greedy = target.lm_head(hidden).argmax(-1)
        assert doc.tokens[doc.answer_start :] == greedy[doc.answer_start - 1 : -1].tolist()
        stored = torch.stack(doc.hidden)[:-1].float()
        torch.testing.assert_close(stored, hidden[:-1], atol=0.05, rtol=0.02)
        assert len(doc.hidden) == len(doc.tokens)


def test_drawn_tokens_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    drawn = distill.draw(logits, torch.full((20_000,), 0.7), torch.Generator().manual_seed(0))
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    assert (torch.bincount(drawn, minlength=4) / 20_000 - expected).abs().max() < 0.015


def test_head_loss_is_the_cross_entropy_and_its_gradient():
    torch.manual_seed(0)
    x, weight = torch.randn(300, 16, requires_grad=True), 0.3 * torch.randn(50, 16)
    rows, mass = torch.randint(0, 50, (300, 3)), torch.rand(300, 3)
    loss = train_drafter.HeadLoss.apply(x, weight, rows, mass)
    (loss * 2).backward()
    found, x.grad = x.grad, None
    expected = -(torch.log_softmax(x @ weight.T, -1).gather(1, rows) * mass).sum()
    (expected * 2).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, x.grad, atol=1e-4, rtol=1e-4)


def write_model(target: Target, folder: Path) -> None:
    c = target.config
    weights = {"model.embed_tokens.weight": target.embedding.weight, "model.norm.weight": target.norm.weight}
    for i, layer in enumerate(target.layers):
        q, k, v = layer.qkv.weight.split([32, 16, 16])
        gate, up = layer.gate_up.weight.chunk(2)
        names = {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": layer.attention_out.weight, "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight, "input_layernorm": layer.attention_norm.weight,
            "post_attention_layernorm": layer.mlp_norm.weight,
        }  # fmt: skip
        weights |= {f"model.layers.{i}.{name}.weight": w for name, w in names.items()}
    save_file({name: w.detach().contiguous() for name, w in weights.items()}, folder / "model.safetensors")
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-5, "max_position_embeddings": c.max_position, "tie_word_embeddings": True,
        "eos_token_id": END,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def test_training_learns_and_resumes(target, tmp_path: Path):
    """Random models answer in short cycles, which a drafter learns fast; a second run goes on from the checkpoint."""
    write_model(target, tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    for shard in range(3):
        docs = generate(target, 24, [[token] for token in range(10 + shard, 100, 3)])
        distill.write_shard(data / f"shard-{shard:05d}.safetensors", docs, {})

    def train(positions: int) -> list[dict]:
        folders = ["--model", tmp_path, "--data", data, "--output", tmp_path / "out"]
        shape = ["--hot-vocabulary", "64", "--exit-dim", "32", "--blocks", "1", "--unroll", "3", "--window", "8"]
        run = f"--batch 4 --positions {positions} --held-out 1 --every 50".split()
        command = [sys.executable, ROOT / "build/train_drafter.py", *folders, *shape, *run]
        subprocess.run(command, check=True, capture_output=True)
        return [json.loads(line) for line in (tmp_path / "out/log.jsonl").open()]

    first = train(3200)
    assert [record["step"] for record in first] == [50, 100]
    again = train(6400)
    assert [record["step"] for record in again] == [50, 100, 150, 200]
    assert again[-1]["chain_acceptance_length"] > 1.3
    with safe_open(tmp_path / "out/drafter.safetensors", framework="pt") as file:
        assert file.get_tensor("hot_ids").shape == (64,)
        assert file.get_tensor("rnn_u.weight").dtype == torch.bfloat16
