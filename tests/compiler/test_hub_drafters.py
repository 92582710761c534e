"""Drafters of the hub from their folder to served text, by the commands that a user types."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from redraft.batch import DraftBatch
from redraft.bundle.manifest import Bundle
from redraft.cli import build, inspect
from redraft.compiler.methods import drafter_kind
from redraft.engines import load_engine
from redraft.model_defs.drafters.registry import load_drafter
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.model import Target
from redraft.request import AUTO_REGRESSIVE, GenerateRequest
from redraft.runtime import Runtime
from tests.cli.commands import invoke
from tests.engines.drafters.drafting import check
from tests.engines.tiny import chain, make_batch, random_model, tiny_target, write_model
from tests.model_defs.drafters.hub.forms import (
    BLOCK,
    HIDDEN,
    Form,
    block_logits,
    dspark,
    eagle,
    eagle3_logits,
    medusa,
    medusa_logits,
    modelopt,
    modelopt_without_head,
    specforge,
    speculators,
)

run = partial(invoke, build.main)
TEXT = [5, 98, 6, 60, 17]
OPTIONS = ("--max-len", 64, "--precision", "fp32", "--slots", 3, "--max-tree", 20)


@pytest.fixture(scope="module")
def target() -> Target:
    return random_model(replace(tiny_target().config, num_layers=7, hidden_size=HIDDEN, intermediate_size=40))


@pytest.fixture
def model(target, tmp_path) -> Path:
    write_model(target, tmp_path / "model")
    return tmp_path / "model"


def entering(target: Target, form: Form) -> list[torch.Tensor]:
    """What enters the layers that a drafter reads, at all tokens of TEXT but the root."""
    attend, x, found = causal_attend(target.config, 4), target.embedding(torch.tensor([TEXT[:-1]])), {}
    for index, layer in enumerate(target.layers):
        found[index] = x[0]
        x = layer(x, index, attend)
    found[len(target.layers)] = x[0]
    return [found[layer] for layer in form.layers]


def generate(runtime: Runtime, method: str, sampling: dict) -> list[int]:
    request = GenerateRequest(id="a", input_ids=[5, 98, 6], max_tokens=12, sampling=sampling, method=method)
    sequence, tokens = runtime.sequence("a", request), list[int]()
    runtime.scheduler.submit(sequence)
    while not runtime.scheduler.idle:
        tokens += [token for output in runtime.scheduler.step() for token in output.token_ids]
    return tokens


def test_what_a_drafter_has_not_seen_and_what_is_no_number_is_said(target, model, tmp_path):
    """Its config.json says 64 positions; weights that are not finite are named as the folder calls them."""
    form = specforge()
    options = ("--model", model, "--drafter", form.write(tmp_path / "drafter"), "--beam-width", 2, "--beam-length", 2)
    limits = ("--precision", "fp32", "--slots", 2, "--max-tree", 20, "--candidates", 4)
    for length in (64, 100):
        done = run(*options, *limits, "--output", tmp_path / f"b{length}", "--max-len", length)
        assert done.exit_code == 0, done.output
        said = "is made for contexts of 64 positions, and --max-len is 100" in " ".join(done.output.split())
        assert said == (length == 100)
    form.tensors["midlayer.mlp.up_proj.weight"][3, 1] = float("nan")
    form.write(tmp_path / "drafter")
    done = run(*options, *limits, "--output", tmp_path / "refused")
    assert "midlayer.mlp.up_proj.weight holds NaN or infinity in 1 of its rows" in " ".join(done.output.split())
    assert not (tmp_path / "refused").exists()


@torch.no_grad()
def test_drafters_of_a_bundle_read_their_own_columns(target, model, tmp_path, capsys):
    """Two read fused layers, one of them for the target's head, and one the hidden states. Drafts from the engine's
    features are those of the forms' definitions, at most as deep as a drafter goes; the text is that of plain
    decoding."""
    torch.manual_seed(3)
    names = "eagle3", "medusa", "block"
    deep, heads, block = modelopt_without_head(), medusa(), dspark()
    for name, form in zip(names, (deep, heads, block), strict=True):
        form.write(tmp_path / name)
    deep.tensors["lm_head.weight"] = target.lm_head.weight
    shape = 'construction = "beam"\nbeam_width = 2\ncandidates = 4\nsupport = 0\n'
    tables = [f'[{name}]\ndrafter = "{tmp_path / name}"\n{shape}' for name in names]
    tables[0] += "beam_length = 3\n"
    (tmp_path / "methods.toml").write_text("\n".join(tables))
    done = run("--model", model, "--methods", tmp_path / "methods.toml", "--output", tmp_path / "b", *OPTIONS)
    assert done.exit_code == 0, done.output
    assert "its config.json says that it was made for a/b" in " ".join(done.output.split())
    assert "medusa: drafts are 3 deep, as deep as this drafter goes" in " ".join(done.output.split())
    bundle = Bundle.load(tmp_path / "b")
    assert bundle.config.target.feature_size == 3 * HIDDEN
    assert [bundle.config.methods[name].beam_length for name in names] == [3, 3, 5]
    assert bundle.config.methods["eagle3"].form == "EAGLE-3 (ModelOpt)"
    inspect.main(tmp_path / "b")
    assert "eagle3 (read from EAGLE-3 (ModelOpt))" in capsys.readouterr().out
    engine = load_engine(bundle)
    _, features = engine.execute(make_batch([chain(1, [], TEXT[:-1])], words=1))
    ints = partial(np.array, dtype=np.int32)
    batch = DraftBatch(features[:4].copy(), ints(TEXT[1:]), ints([0, 4]), ints([1]), ints([0]))
    drafted = engine.drafters["eagle3"].draft(batch)
    layers, embedding = entering(target, deep), target.embedding.weight

    def expected(path: list[int]) -> torch.Tensor:
        return eagle3_logits(deep, embedding, layers, TEXT[1:], path)[-1].log_softmax(-1)

    check(load_drafter(tmp_path / "eagle3", target), drafted, 0, expected)

    def expected_of_block(path: list[int]) -> torch.Tensor:
        of_head, filled = target.lm_head.weight, [*path, *[0] * (BLOCK - 1 - len(path))]
        logits = block_logits(block, embedding, of_head, entering(target, block), TEXT[-1], filled, from_root=True)
        return logits[len(path)].log_softmax(-1)

    check(load_drafter(tmp_path / "block", target), engine.drafters["block"].draft(batch), 0, expected_of_block)
    drafted = engine.drafters["medusa"].draft(DraftBatch.of_roots(features[3:4].copy(), ints(TEXT[-1:])))
    hidden = target(torch.tensor([TEXT[:-1]]), causal_attend(target.config, 4)).hidden[0, -1]
    logits = medusa_logits(heads, hidden).log_softmax(-1)
    check(load_drafter(tmp_path / "medusa", target), drafted, 0, lambda path: logits[len(path)])
    runtime = Runtime.load(tmp_path / "b")
    runtime.fix_budget()  # drafts where none pay, too
    runtime.end_ids = frozenset()
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        text = generate(runtime, AUTO_REGRESSIVE, sampling)
        assert [generate(runtime, name, sampling) for name in names] == [text] * len(names)


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        (speculators(norm_before_residual=None), [], "give --read-as norm_before_residual=true or --read-as"),
        (modelopt(eagle_aux_hidden_state_layer_ids=[1, 8]), [], "reads layers (2, 9), the target has 7"),
        (specforge(vocab_size=99), [], "d2t gives 53 tokens from"),
        (Form({"architecture": "ReDrafterForQWenLM"}, {"x": torch.ones(1)}), [], "`redraft export from-trtllm"),
    ],
)
def test_refusals_name_the_reason(model, tmp_path, form, options, message):
    form.write(tmp_path / "drafter")
    done = run("--model", model, "--drafter", tmp_path / "drafter", "--output", tmp_path / "b", *OPTIONS, *options)
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (None, r": no \.safetensors file, pytorch_model\*\.bin or medusa_lm_head\.pt"),
        ("model-0000{}-of-00002.safetensors", r"model-00002-of-00002\.safetensors is missing; model\.safetensors\.i"),
    ],
)
@pytest.mark.parametrize("form", [eagle, modelopt])
def test_missing_weights_are_named(tmp_path, form, kind, message):
    """Without them a folder of EAGLE-1 or EAGLE-3 looks like a whole model, whose tokenizer would be asked for."""
    weights = form().write(tmp_path) / "model.safetensors"
    if kind:
        shards = {str(i): kind.format(i) for i in (1, 2)}
        weights.rename(tmp_path / shards["1"])
        index = "model.safetensors.index.json" if kind.endswith("safetensors") else "pytorch_model.bin.index.json"
        (tmp_path / index).write_text(json.dumps({"weight_map": shards}))
    weights.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match=message):
        drafter_kind(tmp_path)
