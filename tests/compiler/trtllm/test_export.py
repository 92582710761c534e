"""TensorRT-LLM's ReDrafter checkpoint against its documented rules, written out here once more, and the way back."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from redraft.compiler.trtllm import convert
from redraft.model_defs.drafters.medusa import MedusaDrafter
from redraft.model_defs.target.model import Target
from tests.compiler.trtllm.tiny_trtllm import (
    DRAFTERS,
    HEADS,
    HIDDEN,
    INTER,
    LAYERS,
    SIZE,
    VOCAB,
    export,
    make_apple,
    make_own,
    make_target,
    refusal,
    run,
)

SHIPPED = Path(__file__).parents[3] / "drafters" / "SmolLM2-135M-Instruct"
SPLITS = [(12, 4), (3, 1), (3, 6), (1, 2)]
"""KV heads, of 12 heads, and TP: whole and divided groups, and copies of a KV head on several ranks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "llama")


@pytest.fixture(scope="module")
def apple(tmp_path_factory) -> Path:
    return make_apple(tmp_path_factory.mktemp("drafter") / "apple")


@pytest.fixture
def checkpoint(model, apple, tmp_path) -> Path:
    return export(model, apple, tmp_path / "checkpoint", "--tp", 3)


def rows(weight: Tensor, rank: int, tp: int, dim: int = 0) -> Tensor:
    """What a rank holds of a weight whose dimension is divided into equal parts."""
    part = weight.shape[dim] // tp
    return weight.narrow(dim, rank * part, part)


def kv_heads_of(rank: int, tp: int, kv_heads: int) -> list[int]:
    """The KV heads that a rank's query heads attend with."""
    return sorted({head * kv_heads // HEADS for head in range(rank * HEADS // tp, (rank + 1) * HEADS // tp)})


@pytest.mark.parametrize(("kv_heads", "tp"), SPLITS)
def test_each_rank_holds_what_the_rules_give_it(tmp_path, kv_heads, tp):
    parallel_embedding = kv_heads < tp
    model, drafter = make_target(tmp_path / "model", kv_heads, qwen=True), make_apple(tmp_path / "drafter")
    flags = ["--tp", tp] + ["--parallel-embedding"] * parallel_embedding
    folder = export(model, drafter, tmp_path / "out", *flags)
    hf, apple = load_file(model / "model.safetensors"), load_file(drafter / "model.safetensors")
    for rank in range(tp):
        kv = kv_heads_of(rank, tp, kv_heads)

        def heads(weight: Tensor, kept: list[int]) -> Tensor:
            return torch.cat([weight[head * SIZE : (head + 1) * SIZE] for head in kept])

        embedding = hf["model.embed_tokens.weight"]
        expected = {
            "transformer.vocab_embedding.weight": rows(embedding, rank, tp) if parallel_embedding else embedding,
            "transformer.ln_f.weight": hf["model.norm.weight"],
            "lm_head.weight": rows(hf["lm_head.weight"], rank, tp),
        }
        for i in range(LAYERS):
            ours, theirs = f"transformer.layers.{i}", f"model.layers.{i}"
            for kind in ("weight", "bias"):
                q, k, v = (hf[f"{theirs}.self_attn.{p}_proj.{kind}"] for p in "qkv")
                qkv = torch.cat([rows(q, rank, tp), heads(k, kv), heads(v, kv)])
                expected[f"{ours}.attention.qkv.{kind}"] = qkv
            expected |= {
                f"{ours}.attention.dense.weight": rows(hf[f"{theirs}.self_attn.o_proj.weight"], rank, tp, 1),
                f"{ours}.mlp.fc.weight": rows(hf[f"{theirs}.mlp.gate_proj.weight"], rank, tp),
                f"{ours}.mlp.gate.weight": rows(hf[f"{theirs}.mlp.up_proj.weight"], rank, tp),
                f"{ours}.mlp.proj.weight": rows(hf[f"{theirs}.mlp.down_proj.weight"], rank, tp, 1),
                f"{ours}.input_layernorm.weight": hf[f"{theirs}.input_layernorm.weight"],
                f"{ours}.post_layernorm.weight": hf[f"{theirs}.post_attention_layernorm.weight"],
            }
        for name, source in {
            "input_proj.weight": "input_proj.weight", "input_proj.bias": "input_proj.bias",
            "layers.0.linear.weight": "lm_head.0.linear.weight", "layers.0.linear.bias": "lm_head.0.linear.bias",
            "layers.1.linear.weight": "lm_head.1.linear.weight", "layers.1.linear.bias": "lm_head.1.linear.bias",
            "lm_head.weight": "lm_head.2.weight", "rnn_u.weight": "rnn_u.weight", "rnn_u.bias": "rnn_u.bias",
            "rnn_w.weight": "rnn_w.weight",
        }.items():  # fmt: skip
            expected[f"drafter.{name}"] = rows(apple[source], rank, tp)
        found = load_file(folder / f"rank{rank}.safetensors")
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert found[name].dtype == torch.bfloat16
            assert torch.equal(found[name], weight), (rank, name)
    assert not (folder / f"rank{tp}.safetensors").exists()


def test_configuration(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = make_target(
        tmp_path / "model", rope_theta=5e5, rope_scaling=scaling | {"original_max_position_embeddings": 32}
    )
    flags = ("--tp", 3, "--dtype", "float16", "--beam-width", 6, "--beam-length", 3, "--sampled")
    raw = json.loads((export(model, make_apple(tmp_path / "d"), tmp_path / "out", *flags) / "config.json").read_text())
    assert raw == {
        "architecture": "ReDrafterForLLaMALM", "base_model_architecture": "LlamaForCausalLM", "dtype": "float16",
        "logits_dtype": "float32", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 3, "head_size": SIZE,
        "hidden_act": "silu", "norm_epsilon": 1e-6, "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": 64, "rotary_base": 5e5, "attn_bias": False, "mlp_bias": False,
        "rotary_scaling": {
            "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "mapping": {"world_size": 3, "tp_size": 3, "pp_size": 1}, "use_parallel_embedding": False,
        "embedding_sharding_dim": 0, "redrafter_num_layers": 2, "redrafter_hidden_size": HIDDEN,
        "redrafter_exit_dim": 60, "redrafter_is_rnn": True, "redrafter_num_beams": 6,
        "redrafter_draft_len_per_beam": 3, "redrafter_greedy_search": False,
    }  # fmt: skip


def test_qwen_is_its_own_architecture(tmp_path):
    model = make_target(tmp_path / "model", qwen=True)
    raw = json.loads((export(model, make_apple(tmp_path / "d"), tmp_path / "out") / "config.json").read_text())
    assert (raw["architecture"], raw["base_model_architecture"]) == ("ReDrafterForQWenLM", "Qwen2ForCausalLM")
    assert (raw["qwen_type"], raw["attn_bias"], raw["rotary_scaling"]) == ("qwen2", True, None)


def assert_equal_folders(found: Path, expected: Path, weights: str) -> None:
    ours, theirs = load_file(found / weights), load_file(expected / weights)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype, name
        assert torch.equal(ours[name], weight), name
    assert json.loads((found / "config.json").read_text()) == json.loads((expected / "config.json").read_text())


@pytest.mark.parametrize(("kind", "tp"), [(kind, 6 if index % 2 else 1) for index, kind in enumerate(DRAFTERS)])
def test_round_trip_restores_every_bit(tmp_path, model, kind, tp):
    drafter = DRAFTERS[kind](tmp_path / "drafter", model)
    checkpoint = export(model, drafter, tmp_path / "checkpoint", "--tp", tp, *["--parallel-embedding"] * (tp > 3))
    assert run("from-trtllm", checkpoint, "--output", tmp_path / "back").exit_code == 0
    assert_equal_folders(tmp_path / "back" / "target", model, "model.safetensors")
    weights = "model.safetensors" if kind.startswith("apple") else "drafter.safetensors"
    assert_equal_folders(tmp_path / "back" / "drafter", drafter, weights)
    assert (tmp_path / "back" / "target" / "generation_config.json").read_text() == '{"eos_token_id": [2, 7]}'


@pytest.mark.parametrize(("kv_heads", "tp"), SPLITS[2:])
def test_tied_targets_with_biases_come_back_too(tmp_path, apple, kv_heads, tp):
    model = make_target(tmp_path / "model", kv_heads, qwen=True, tie_word_embeddings=True)
    checkpoint = export(model, apple, tmp_path / "checkpoint", "--tp", tp, "--dtype", "float32")
    assert run("from-trtllm", checkpoint, "--output", tmp_path / "back").exit_code == 0
    back = load_file(tmp_path / "back" / "target" / "model.safetensors")
    for name, weight in load_file(model / "model.safetensors").items():
        assert torch.equal(back.pop(name), weight.float()), name
    assert not back


def refused_export(tmp_path: Path, model: Path, drafter: Path, *flags: object) -> str:
    """The message; nothing is left behind."""
    (tmp_path / "made").mkdir()
    output = tmp_path / "made" / "out"
    message = refusal("trtllm", "--model", model, "--drafter", drafter, "--output", output, *flags)
    assert list((tmp_path / "made").iterdir()) == []
    return message


def test_initial_state_of_the_paper_is_refused(tmp_path, model):
    drafter = make_own(tmp_path / "drafter", model, initial_state="embedding")
    assert "--set initial_state=zero" in refused_export(tmp_path, model, drafter)


def test_a_drafter_of_the_papers_first_state_may_draft_from_zero(tmp_path, model):
    """Its files are those of the same weights that were trained from zero."""
    drafters = {name: make_own(tmp_path / name, model, initial_state=name) for name in ("embedding", "zero")}
    outputs = [export(model, folder, tmp_path / f"{name}-out", "--zero-state") for name, folder in drafters.items()]
    assert_equal_folders(outputs[0], outputs[1], "rank0.safetensors")
    assert_equal_folders(outputs[0] / "drafter", outputs[1] / "drafter", "factors.safetensors")


@pytest.mark.parametrize(
    ("tp", "reason"),
    [
        (2, "the 3 KV heads to be a multiple of it, or it a multiple of them"),
        (24, "the 12 attention heads to be a multiple of it"),
        (7, "the 120 rows of the vocabulary to be a multiple of it"),
    ],
)
def test_every_size_has_to_divide(tmp_path, model, apple, tp, reason):
    assert reason in refused_export(tmp_path, model, apple, "--tp", tp)


def test_an_engine_takes_a_step_of_all_sequences_at_once(tmp_path, model, apple):
    flags = ("--max-batch-size", 300, "--beam-width", 10, "--beam-length", 4)
    script = (export(model, apple, tmp_path / "out", *flags) / "build_engines.sh").read_text()
    assert f"--max_num_tokens {300 * 41}" in script


def test_other_kinds_of_drafter_are_refused(tmp_path, model):
    target = Target.from_folder(model)
    MedusaDrafter(MedusaDrafter.configure(target), target).save(tmp_path / "drafter")
    assert "a drafter 'medusa': TensorRT-LLM's ReDrafter takes" in refused_export(tmp_path, model, tmp_path / "drafter")


def test_drafter_of_another_target_is_refused(tmp_path, model):
    drafter = make_own(tmp_path / "drafter", model)
    other = make_target(tmp_path / "other", 12)
    assert "was trained for another target" in refused_export(tmp_path, other, drafter)


@pytest.mark.parametrize(("error", "status"), [(OSError(28, "No space left on device"), 1), (KeyboardInterrupt(), 130)])
def test_stopped_export_leaves_the_old_checkpoint_alone(tmp_path, model, apple, checkpoint, monkeypatch, error, status):
    before = {file: file.read_bytes() for file in checkpoint.rglob("*") if file.is_file()}
    write = convert.save_tensors

    def fails_at_the_second_rank(weights, path, **settings):
        if path.name == "rank1.safetensors":
            raise error
        write(weights, path, **settings)

    monkeypatch.setattr(convert, "save_tensors", fails_at_the_second_rank)
    arguments = ("trtllm", "--model", model, "--drafter", apple, "--tp", 3, "--dtype", "float32")
    for output in (checkpoint, tmp_path / "new"):
        assert run(*arguments, "--output", output).exit_code == status
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert {file: file.read_bytes() for file in checkpoint.rglob("*") if file.is_file()} == before


def edit(checkpoint: Path, **changes) -> None:
    raw = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(raw | changes))


def rewrite(checkpoint: Path, rank: int, change) -> None:
    weights = load_file(checkpoint / f"rank{rank}.safetensors")
    change(weights)
    save_file(weights, checkpoint / f"rank{rank}.safetensors")


BROKEN = {
    "quantized": (lambda c: edit(c, quantization={"quant_algo": "FP8"}), "is quantized (FP8)"),
    "another number of KV heads": (lambda c: edit(c, num_key_value_heads=1), "num_key_value_heads is 1, expected 3"),
    "a rank cut": (lambda c: os.truncate(c / "rank1.safetensors", 5000), "truncated or corrupted"),
    "a weight gone from a rank": (
        lambda c: rewrite(c, 1, lambda w: w.pop("drafter.rnn_w.weight")),
        "ranks 0 and 1 hold different weights, one of them no drafter.rnn_w.weight",
    ),
    "ranks of two checkpoints": (
        lambda c: rewrite(c, 2, lambda w: w["transformer.ln_f.weight"].mul_(2)),
        "transformer.ln_f.weight: ranks 0 and 2 differ",
    ),
    "a drafter's weight cut": (
        lambda c: [
            rewrite(c, rank, lambda w: w.update({"drafter.lm_head.weight": w["drafter.lm_head.weight"][:-1].clone()}))
            for rank in range(3)
        ],
        "is not a whole drafter",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_checkpoints_are_named_and_leave_nothing(checkpoint, tmp_path, what):
    breaks, reason = BROKEN[what]
    breaks(checkpoint)
    assert reason in refusal("from-trtllm", checkpoint, "--output", tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_copies_of_a_kv_head_must_be_equal(tmp_path, model, apple):
    checkpoint = export(model, apple, tmp_path / "checkpoint", "--tp", 6)
    name = "transformer.layers.1.attention.qkv.weight"
    rewrite(checkpoint, 3, lambda w: w[name][-1].zero_())
    assert f"{name}: ranks 2 and 3 differ" in refusal("from-trtllm", checkpoint, "--output", tmp_path / "back")


def test_checkpoints_of_others_are_read(tmp_path, model, apple):
    """TensorRT-LLM's converter leaves no folders of ours, may divide the embedding by columns and tie nothing."""
    checkpoint = export(model, apple, tmp_path / "checkpoint", "--tp", 3)
    for folder in ("target", "drafter"):
        shutil.rmtree(checkpoint / folder)
    edit(checkpoint, architecture="ReDrafterForCausalLM", use_parallel_embedding=True, embedding_sharding_dim=1)
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    for rank in range(3):
        part = rows(embedding, rank, 3, 1).clone()
        rewrite(checkpoint, rank, lambda w, part=part: w.update({"transformer.vocab_embedding.weight": part}))
    assert run("from-trtllm", checkpoint, "--model", model, "--output", tmp_path / "back").exit_code == 0
    assert_equal_folders(tmp_path / "back" / "target", model, "model.safetensors")
    assert_equal_folders(tmp_path / "back" / "drafter", apple, "model.safetensors")


def test_the_default_targets_tokenizer_is_one_that_transformers_4_reads(smollm2, tmp_path):
    convert.write_rest(tmp_path, smollm2, SHIPPED, {})
    tokenizer, original = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "target", smollm2))
    settings = json.loads((tmp_path / "target" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer("Why is the sky blue?") == original("Why is the sky blue?")
