"""A model's checkpoint in a drafter's place: it drafts as a draft LM, or is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, OPTConfig

from redraft.bundle.manifest import Bundle
from redraft.cli import build, inspect
from redraft.compiler import methods
from redraft.request import AUTO_REGRESSIVE, GenerateRequest
from redraft.request_state import RequestState
from redraft.runtime import Runtime
from tests.cli.commands import invoke
from tests.engines.tiny import VOCAB, random_model, tiny_drafter, tiny_lm, tiny_target, write_model, write_tokenizer

TOKENS = {f"t{i}": i for i in range(VOCAB)}
run = partial(invoke, build.main)


@pytest.fixture
def model(tmp_path) -> Path:
    write_model(tiny_target(), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def lm(tmp_path) -> Path:
    write_model(tiny_lm(), tmp_path / "lm")
    return tmp_path / "lm"


def generate(runtime: Runtime, method: str, sampling: dict) -> tuple[list[int], RequestState]:
    request = GenerateRequest(id="a", input_ids=[5, 98, 6], max_tokens=22, sampling=sampling, method=method)
    sequence, tokens = runtime.sequence("a", request), list[int]()
    runtime.scheduler.submit(sequence)
    while not runtime.scheduler.idle:
        tokens += [token for output in runtime.scheduler.step() for token in output.token_ids]
    return tokens, sequence


@pytest.mark.slow
def test_a_target_that_drafts_for_itself_is_always_right(model, tmp_path, monkeypatch):
    """Chains are accepted to their ends by either verifier, and three methods load their draft LM once. It would
    catch a draft LM whose cache or positions are not the target's."""
    (tmp_path / "methods.toml").write_text(
        f"""
        [chain]
        drafter = "{model}"
        construction = "chain"
        beam_width = 1
        beam_length = 3
        candidates = 1
        tree_budget = 3
        ngram = false
        [tree]
        drafter = "{model}"
        beam_length = 2
        ngram = false
        [sps]
        drafter = "{model}"
        construction = "random_chain"
        levels = "1,1,1"
        support = {VOCAB}
        """
    )
    loads, load = [], methods.load_draft_model
    monkeypatch.setattr(methods, "load_draft_model", lambda *given: loads.append(given) or load(*given))
    options = ["--model", model, "--max-len", 64, "--precision", "fp32", "--slots", 2, "--output", tmp_path / "b"]
    done = run(*options, "--methods", tmp_path / "methods.toml")
    assert done.exit_code == 0, done.output
    assert len(loads) == 1
    runtime = Runtime.load(tmp_path / "b")
    runtime.fix_budget()  # drafts where none pay, too
    runtime.end_ids = frozenset()
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        text, _ = generate(runtime, AUTO_REGRESSIVE, sampling)
        for method in ("chain", "tree"):
            tokens, sequence = generate(runtime, method, sampling)
            assert tokens == text, (method, sampling)
            assert sequence.stats.accepted > 3
        if not sampling:
            assert sequence.stats.steps < len(tokens)
    for method, sampling in (("chain", {}), ("sps", {"temperature": 1.0, "seed": 3}), ("sps", {})):
        stats = generate(runtime, method, sampling)[1].stats
        assert stats.accepted_by_depth == stats.offered_by_depth, (method, sampling)
        assert stats.accepted >= 14


@pytest.mark.slow
def test_an_opt_pair_drafts_as_in_the_rsd_paper(tmp_path):
    """An OPT that drafts for itself is always right with every draw, and a smaller one keeps the greedy text. It would
    catch positions of drafted nodes that are not those of the target's."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "ffn_dim": 80, "max_position_embeddings": 70, "init_std": 0.2}
    for name, layers, heads in (("opt", 3, 3), ("small", 1, 1)):
        sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": 32 * heads}
        AutoModelForCausalLM.from_config(OPTConfig(**shape, **sizes)).save_pretrained(tmp_path / name)
        write_tokenizer(tmp_path / name, TOKENS)
    plans = {
        "sps": ("opt", "random_chain", "1,1,1"),
        "rsd_s": ("opt", "stochastic_beam", "3,2"),
        "pair": ("small", "stochastic_beam", "3,2"),
    }
    tables = (
        f'[{name}]\ndrafter = "{tmp_path / folder}"\nconstruction = "{construction}"\nlevels = "{levels}"\n'
        f"support = {VOCAB}\n"
        for name, (folder, construction, levels) in plans.items()
    )
    (tmp_path / "methods.toml").write_text("".join(tables))
    options = ["--model", tmp_path / "opt", "--max-len", 64, "--precision", "fp32", "--slots", 2]
    done = run(*options, "--output", tmp_path / "b", "--methods", tmp_path / "methods.toml")
    assert done.exit_code == 0, done.output
    runtime = Runtime.load(tmp_path / "b")
    runtime.fix_budget()  # drafts where none pay, too
    runtime.end_ids = frozenset()
    for method, sampling in (("sps", {"temperature": 1.0, "seed": 3}), ("rsd_s", {"temperature": 0.7, "seed": 5})):
        stats = generate(runtime, method, sampling)[1].stats
        assert stats.accepted_by_depth == stats.offered_by_depth, method
        assert stats.accepted >= 12
    text, _ = generate(runtime, AUTO_REGRESSIVE, {})
    assert generate(runtime, "pair", {})[0] == text


def test_another_model_has_a_cache_of_its_own_shape(model, lm, tmp_path, capsys):
    options = ["--model", model, "--drafter", lm, "--output", tmp_path / "b", "--max-len", 100, "--slots", 9]
    done = run(*options, "--beam-length", 3)
    assert done.exit_code == 0, done.output
    context = Bundle.load(tmp_path / "b").config.methods["draft_lm"].context
    assert (context.layers, context.num_kv_heads, context.head_size, context.from_text) == (3, 2, 64, True)
    inspect.main(tmp_path / "b")
    assert "context cache 1 MB" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_model_with_other_tokens_is_refused(model, lm, tmp_path):
    write_tokenizer(
        lm, {"moved": 0, **{token: i for token, i in TOKENS.items() if i not in (0, 7)}, "t0": 7, "new": 111}
    )
    done = run("--model", model, "--drafter", lm, "--output", tmp_path / "b", "--max-len", 64)
    assert done.exit_code == 1
    assert f"{lm} has another tokenizer than {model}, a draft LM needs the same: " in done.output
    assert "1 tokens have other ids, such as 't0'; 1 tokens only the target has, such as 't7'; 2 tokens" in done.output
    assert not (tmp_path / "b").exists()


def other_size(lm: Path) -> None:
    write_model(random_model(replace(tiny_lm().config, vocab_size=128)), lm, TOKENS)


def other_kind(lm: Path) -> None:
    (lm / "config.json").write_text('{"model_type": "gpt2"}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_size, "lm: a draft LM needs the target's vocabulary of 111, this one has 128"),
        (other_kind, "lm: unsupported model: model_type 'gpt2'. Supported: Llama"),
    ],
)
def test_a_model_that_cannot_draft_is_refused(model, lm, tmp_path, change, message):
    change(lm)
    done = run("--model", model, "--drafter", lm, "--output", tmp_path / "b", "--max-len", 64)
    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "b").exists()


def test_its_head_may_be_that_of_a_trained_drafter(model, lm, tmp_path):
    trained = tiny_drafter(tiny_target())
    trained.save(tmp_path / "trained")
    options = ["--model", model, "--output", tmp_path / "b", "--max-len", 64, "--hot-vocabulary"]
    sampled = ["--construction", "random_chain", "--support"]
    done = run(*options, tmp_path / "trained", "--drafter", lm, *sampled, 51)
    assert "support is 51, expected at most the 50 tokens that the drafter knows" in done.output
    done = run(*options, tmp_path / "trained", "--drafter", tmp_path / "trained")
    assert f"--hot-vocabulary {tmp_path}/trained: {tmp_path}/trained was trained with its own" in done.output
    save_file({"rnn_u.weight": torch.zeros(1)}, tmp_path / "trained" / "drafter.safetensors")
    done = run(*options, tmp_path / "trained", "--drafter", lm)
    assert f"--hot-vocabulary {tmp_path}/trained: this drafter knows all tokens" in done.output
