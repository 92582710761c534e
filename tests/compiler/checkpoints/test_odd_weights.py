"""Weights and tokenizers that contradict their configuration: read as transformers reads them, or said."""

from __future__ import annotations

import json
import shutil

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from redraft.model_defs.files import INDEX
from redraft.model_defs.target.attention import causal_attend
from redraft.model_defs.target.model import Target
from tests.compiler.checkpoints.tiny_llama import TOKENS, fetch, pickle, write_gguf

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def changed(checkpoint, folder, weights=lambda weights: weights, **config):
    """A copy of the checkpoint with other weights and fields of `config.json`, of which None removes one."""
    shutil.copytree(checkpoint, folder)
    told = json.loads((folder / "config.json").read_text()) | config
    told = {key: value for key, value in told.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(told))
    stored = weights(load_file(folder / "model.safetensors"))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def shard(folder):
    """Cut a folder's weights into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@torch.no_grad()
def logits_of(target, input_ids):
    return target.lm_head(target(input_ids, causal_attend(target.config, input_ids.shape[1])).hidden)


def equal_head(weights):
    return weights | {HEAD: weights[EMBEDDING].clone()}


def without(name):
    return lambda weights: {key: weight for key, weight in weights.items() if key != name}


@pytest.mark.parametrize(
    ("tied", "weights", "store"),
    [
        (True, dict, shard),
        (True, equal_head, None),
        (True, without(HEAD), pickle),
        (True, without(EMBEDDING), None),
        (False, dict, None),
        (False, equal_head, None),
        (None, dict, pickle),
        (None, equal_head, shard),
    ],
)
def test_embeddings_and_head_are_tied_where_transformers_ties_them(checkpoint, tmp_path, tied, weights, store):
    source = changed(checkpoint, tmp_path / "odd", weights, tie_word_embeddings=tied)
    if store:
        store(source)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    folder = fetch(source, tmp_path)
    input_ids = torch.randint(0, len(TOKENS), (1, 30))
    with torch.no_grad():
        want = reference(input_ids).logits
    torch.testing.assert_close(logits_of(Target.from_folder(folder), input_ids), want, atol=1e-4, rtol=0)


def test_a_head_of_its_own_is_said_and_read_from_a_folder_too(checkpoint, tmp_path, capsys):
    """A folder that was never fetched, and one whose configuration says what is so."""
    source = changed(checkpoint, tmp_path / "odd", tie_word_embeddings=True)
    assert not Target.from_folder(source).config.tie_embeddings
    folder = fetch(source, tmp_path)
    assert "ties the LM head to the embeddings, and the weights hold another lm_head.weight" in capsys.readouterr().out
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_missing_head_that_is_not_tied_is_refused(checkpoint, tmp_path):
    source = changed(checkpoint, tmp_path / "odd", without(HEAD), tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"weight 'lm_head\.weight' is missing"):
        fetch(source, tmp_path)


@pytest.mark.parametrize("head", ["none", "equal", "own"])
@torch.no_grad()
def test_a_gguf_is_tied_where_it_has_no_head(reference, tmp_path, head, monkeypatch):
    model = type(reference)(reference.config).eval()
    model.load_state_dict(reference.state_dict())
    if head != "own":
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    add = gguf.GGUFWriter.add_tensor
    leave = lambda self, name, tensor: None if name == "output.weight" and head == "none" else add(self, name, tensor)  # noqa: E731
    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", leave)
    write_gguf(tmp_path / "odd.gguf", model)
    input_ids = torch.randint(0, len(TOKENS), (1, 30))
    found = logits_of(Target.from_folder(fetch(tmp_path / "odd.gguf", tmp_path)), input_ids)
    torch.testing.assert_close(found, model(input_ids).logits, atol=1e-4, rtol=0)


END = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> <s> $B </s>", [("<s>", 0), ("</s>", 1)])


@pytest.mark.parametrize("processor", [END, processors.Sequence([processors.ByteLevel(), END])])
def test_a_tokenizer_no_longer_ends_prompts_with_the_end_token(checkpoint, tmp_path, capsys, processor):
    source = changed(checkpoint, tmp_path / "odd")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.post_processor = processor
    tokenizer.save(str(source / "tokenizer.json"))
    assert AutoTokenizer.from_pretrained(source)("hello").input_ids[-1] == 1
    assert_ends_with_text(fetch(source, tmp_path), ["<s>", "he", "ll", "o"])
    assert "ends every prompt with the end token '</s>'" in capsys.readouterr().out


def test_a_gguf_that_asks_for_it_neither(reference, tmp_path, capsys, monkeypatch):
    add = gguf.GGUFWriter.add_block_count
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_block_count", lambda self, count: (self.add_add_eos_token(True), add(self, count))
    )
    write_gguf(tmp_path / "odd.gguf", reference, cut="llama-bpe")
    assert_ends_with_text(fetch(tmp_path / "odd.gguf", tmp_path), ["<s>", "he", "ll", "o"])
    assert "ends every prompt with the end token '</s>'" in capsys.readouterr().out


def assert_ends_with_text(folder, tokens):
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hello").tokens == tokens
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.convert_ids_to_tokens(loaded("hello").input_ids) == tokens


DAMAGED = "model.layers.1.mlp.up_proj.weight"


def damage(number, dtype):
    def change(weights):
        weights[DAMAGED] = weights[DAMAGED].to(dtype)
        weights[DAMAGED][5, 7] = number
        return weights

    return change


@pytest.mark.parametrize(
    ("number", "dtype"), [(float("nan"), torch.float32), (-float("inf"), torch.bfloat16), (1e300, torch.float64)]
)
def test_weights_that_are_not_finite_are_refused_by_name(checkpoint, tmp_path, number, dtype):
    source = changed(checkpoint, tmp_path / "odd", damage(number, dtype))
    with pytest.raises(ValueError, match=rf"{DAMAGED} .* holds NaN or infinity"):
        fetch(source, tmp_path)
    assert list((tmp_path / "models").iterdir()) == []
    if number == 1e300:
        return  # which only bfloat16 cannot hold
    with pytest.raises(ValueError, match=rf"{DAMAGED} holds NaN or infinity in 1 of its rows, the first of which is 5"):
        Target.from_folder(source)


def test_weights_that_no_layer_reads_are_said(checkpoint, reference, tmp_path, capsys):
    extra = {f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(32) for i in (0, 1)}
    extra |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.layers.2.mlp.x": torch.ones(2)}
    fetch(changed(checkpoint, tmp_path / "odd", lambda weights: weights | extra), tmp_path)
    said = capsys.readouterr().out
    unread = sorted(name for name in extra if "inv_freq" not in name)
    assert f"no layer reads these weights, which are left out: {', '.join(unread)}" in said


@pytest.mark.parametrize("same", [True, False])
def test_one_weight_in_two_files(checkpoint, tmp_path, same):
    source = changed(checkpoint, tmp_path / "odd")
    shard(source)
    (source / INDEX).unlink()
    name = "model.layers.0.mlp.up_proj.weight"
    weight = load_file(checkpoint / "model.safetensors")[name]
    save_file({name: weight + (0 if same else 1)}, source / "c.safetensors")
    if same:
        fetch(source, tmp_path)
        return
    with pytest.raises(ValueError, match=rf"two different weights for one place: {name} in .* and {name} in c"):
        fetch(source, tmp_path)
