"""Fetching from a GGUF file."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from redraft.bundle.backends import OPENVINO, Precision
from redraft.bundle.generation import GenerationConfig
from redraft.bundle.writer import copy_tokenizer
from redraft.chat import ChatTemplate
from redraft.cli.bundles import usual_precision
from redraft.compiler.checkpoints.gguf import GgufCheckpoint
from redraft.compiler.checkpoints.source import FetchError
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.folder import GGUF, count_numbers
from tests.compiler.checkpoints.tiny_llama import assert_complete, assert_same_model, fetch, rewrite, stored, write_gguf


def test_gguf_with_llama3_rope(gguf_file, reference, tmp_path):
    """In a folder of downloads, where a tokenizer and a template are another model's."""
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    shutil.copy(gguf_file, downloads)
    Tokenizer(models.BPE({"h": 0, "e": 1}, [])).save(str(downloads / "tokenizer.json"))
    (downloads / "chat_template.jinja").write_text("another")
    folder = fetch(downloads / gguf_file.name, tmp_path)
    assert_complete(folder, "tiny", GGUF)
    assert TargetConfig.load(folder).rope == TargetConfig.from_hf(reference.config.to_dict()).rope
    assert_same_model(folder, reference)


def test_the_file_is_kept_and_not_copied(gguf_file, tmp_path):
    """Its folder holds it after the source is gone."""
    source = tmp_path / "mine.gguf"
    shutil.copy(gguf_file, source)
    folder = fetch(source, tmp_path)
    assert (folder / GGUF).samefile(source)
    source.unlink()
    assert count_numbers(folder) == sum(weight.numel() for weight in stored(gguf_file).values())
    target = Target.from_folder(folder).state_dict()
    assert torch.equal(target["layers.1.down.weight"], stored(gguf_file)["blk.1.ffn_down.weight"])


def test_a_former_versions_copy_in_bfloat16_is_fetched_again(gguf_file, tmp_path, capsys):
    folder = fetch(gguf_file, tmp_path)
    (folder / GGUF).rename(folder / "model.safetensors")
    fetch(gguf_file, tmp_path)
    assert f"a former version wrote bfloat16 when {folder} was fetched" in capsys.readouterr().out
    assert (folder / GGUF).samefile(gguf_file)
    assert not (folder / "model.safetensors").exists()
    fetch(gguf_file, tmp_path)
    assert "reusing" in capsys.readouterr().out


def test_a_fetched_folder_is_fetched_by_another_name(gguf_file, reference, tmp_path):
    first = fetch(gguf_file, tmp_path / "first")
    (first / "chat_template.jinja").write_text("{{ messages[0].content }} of its own")
    second = fetch(first, tmp_path / "second")
    assert (second / GGUF).samefile(first / GGUF)
    assert "of its own" in (second / "chat_template.jinja").read_text()
    assert_same_model(second, reference)


def test_another_file_system_gets_a_copy(gguf_file, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    folder = fetch(gguf_file, tmp_path)
    assert not (folder / GGUF).samefile(gguf_file)
    assert (folder / GGUF).read_bytes() == gguf_file.read_bytes()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_floats_of_a_file_are_what_the_package_dequantizes(kind, gguf_file, tmp_path, monkeypatch):
    """In the dtype that is asked for; without one, matrices are bfloat16."""
    kind = gguf.GGMLQuantizationType[kind]
    rewrite(gguf_file, tmp_path / "tiny.gguf", lambda name, weight: kind if weight.ndim == 2 else None)
    folder = fetch(tmp_path / "tiny.gguf", tmp_path)
    exact, rounded = Target.from_folder(folder), Target.from_folder(folder, None)
    for name, of_file in {"embedding": "token_embd", "layers.0.down": "blk.0.ffn_down", "norm": "output_norm"}.items():
        want = stored(tmp_path / "tiny.gguf")[f"{of_file}.weight"]
        assert torch.equal(exact.get_parameter(f"{name}.weight"), want)
        assert torch.equal(rounded.get_parameter(f"{name}.weight"), want.bfloat16() if want.ndim == 2 else want)


def test_a_kept_file_that_is_damaged_later_is_named(gguf_file, tmp_path):
    folder = fetch(gguf_file, tmp_path)
    whole = gguf_file.read_bytes()
    (folder / GGUF).unlink()
    (folder / GGUF).write_bytes(whole[:-64])
    with pytest.raises(ValueError, match=rf"model\.gguf is cut or damaged.* its {len(whole) - 64} bytes"):
        Target.from_folder(folder)


def test_rows_that_are_no_blocks_are_named(gguf_file, tmp_path):
    """A width of 32, with a type whose blocks have 256."""
    whole, type_of = gguf_file.read_bytes(), gguf.GGMLQuantizationType
    at = whole.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 2 * 8
    assert int.from_bytes(whole[at : at + 4], "little") == type_of.F32
    (tmp_path / "odd.gguf").write_bytes(whole[:at] + int(type_of.Q6_K).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight has rows of 32 numbers, .* blocks of 256"):
        fetch(tmp_path / "odd.gguf", tmp_path)


def test_a_type_that_llama_cpp_has_given_up_is_named(gguf_file, tmp_path):
    """A new download would be as it is."""
    whole = gguf_file.read_bytes()
    at = whole.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 2 * 8
    (tmp_path / "old.gguf").write_bytes(whole[:at] + (31).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight is Q4_0_4_4, which is not read; take the model as"):
        fetch(tmp_path / "old.gguf", tmp_path)


@pytest.mark.parametrize(
    ("kind", "odd", "precision", "said"),
    [
        (
            "MXFP4",
            "blk.1.ffn_down.weight",
            Precision.source,
            r"takes MXFP4 \(.*mlp\.down.*\) as it is: .* these \d+ MB",
        ),
        ("MXFP4", "", Precision.bf16, r"takes MXFP4 \(.*\) as it is: bundles store all weights in bfloat16"),
        ("MXFP4", "none", Precision.source, ""),
        ("IQ4_NL", "", Precision.source, r"bundles store IQ4_NL as Q8_0, in more bytes"),
    ],
)
def test_most_of_a_files_blocks_decide_what_is_built(gguf_file, tmp_path, capsys, kind, odd, precision, said):
    """One tensor of a type that no operator takes leaves the others in their blocks."""
    types = gguf.GGMLQuantizationType

    def type_of(name: str, weight: torch.Tensor) -> gguf.GGMLQuantizationType | None:
        return (types[kind] if name.startswith(odd) else types.Q8_0) if weight.ndim == 2 else None

    rewrite(gguf_file, tmp_path / "odd.gguf", type_of)
    folder = fetch(tmp_path / "odd.gguf", tmp_path)
    assert usual_precision(folder, OPENVINO, Precision.bf16) == precision
    out = capsys.readouterr().out
    assert re.search(said, out) if said else "as it is" not in out


def test_gguf_templates_by_name(reference, tmp_path, monkeypatch):
    sources = {"default": "plain", "tool_use": "{{ tools }}"}
    named = [{"name": name, "template": source} for name, source in sources.items()]
    add = gguf.GGUFWriter.add_chat_template
    monkeypatch.setattr(gguf.GGUFWriter, "add_chat_template", lambda self, _: add(self, named))
    write_gguf(tmp_path / "named.gguf", reference)
    template = ChatTemplate.load(fetch(tmp_path / "named.gguf", tmp_path))
    assert template.render([{"role": "user", "content": "a"}]) == "plain"
    assert template.source == sources["tool_use"]


def test_the_sampling_that_a_file_advises_is_taken_along(reference, tmp_path, monkeypatch):
    add = gguf.GGUFWriter.add_block_count

    def advising(self, count):
        self.add_float32("general.sampling.temp", 0.7)
        self.add_float32("general.sampling.min_p", 0.05)
        self.add_int32("general.sampling.top_k", 20)
        add(self, count)

    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", advising)
    write_gguf(tmp_path / "advising.gguf", reference)
    folder = fetch(tmp_path / "advising.gguf", tmp_path)
    assert GenerationConfig.read(folder) == GenerationConfig(temperature=0.7, min_p=0.05, top_k=20)
    (bundle := tmp_path / "bundle").mkdir()
    copy_tokenizer(folder, bundle)
    assert GenerationConfig.read(bundle) == GenerationConfig.read(folder)


def test_truncated_gguf_and_other_architectures(gguf_file, reference, tmp_path):
    broken, whole = tmp_path / "broken.gguf", gguf_file.read_bytes()
    for text, message in (
        *((whole[:size], rf"broken\.gguf is cut or damaged.* its {size} bytes") for size in (8, 200, 20_000)),
        (whole[:-64], rf"its {len(whole) - 64} bytes do not hold"),
        (b"", "is not a GGUF file"),
        (b"PK" + whole, "does not begin with GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 9\n", r"broken\.gguf is a git-lfs pointer"),
    ):
        broken.write_bytes(text)
        with pytest.raises(ValueError, match=message):
            fetch(broken, tmp_path)
    write_gguf(tmp_path / "other.gguf", reference, architecture="mamba")
    with pytest.raises(FetchError, match="GGUF architecture 'mamba'"):
        fetch(tmp_path / "other.gguf", tmp_path)


def test_gguf_tensors_without_a_place_or_a_known_quantization(reference, tmp_path, monkeypatch):
    add = gguf.GGUFWriter.write_header_to_file
    for name, tensor, message in (
        ("blk.0.attn_q.bias", np.zeros(32, np.float32), r"holds 1 tensors .* such as blk\.0\.attn_q\.bias"),
        ("output_norm.bias", np.zeros(32, np.float64), "is F64, which is not read; take the model as Q8_0"),
    ):
        with monkeypatch.context() as patch:
            odd = lambda self, name=name, tensor=tensor: (self.add_tensor(name, tensor), add(self))  # noqa: E731
            patch.setattr(gguf.GGUFWriter, "write_header_to_file", odd)
            write_gguf(tmp_path / "odd.gguf", reference)
        with pytest.raises(ValueError, match=message):
            fetch(tmp_path / "odd.gguf", tmp_path)


def test_a_part_of_a_gguf_file_is_refused(reference, tmp_path, monkeypatch):
    add = gguf.GGUFWriter.add_block_count
    part = lambda self, count: (self.add_uint16("split.count", 3), add(self, count))  # noqa: E731
    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", part)
    write_gguf(tmp_path / "part.gguf", reference)
    with pytest.raises(FetchError, match="one of 3 parts: join them with"):
        fetch(tmp_path / "part.gguf", tmp_path)


@pytest.mark.parametrize(
    ("cut", "words", "first"),
    [
        ("gpt-2", ["a", "\u010a", "\u010a", "1234"], []),
        ("smollm", ["a", "\u010a\u010a", "1", "2", "3", "4"], []),
        ("llama-bpe", ["a", "\u010a\u010a", "123", "4"], ["<s>"]),
    ],
)
def test_texts_are_cut_into_words_as_the_file_says(cut, words, first, reference, tmp_path):
    write_gguf(tmp_path / "cut.gguf", reference, cut=cut)
    tokenizer = GgufCheckpoint(tmp_path / "cut.gguf", "cut").tokenizer().backend_tokenizer
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n1234")] == words
    assert tokenizer.encode("hello").tokens == [*first, "he", "ll", "o"]
    assert tokenizer.model.ignore_merges == bool(first)


@pytest.mark.parametrize(("cut", "message"), [("viking", "pre, .* is 'viking'; known are .*smollm"), (None, "missing")])
def test_an_unknown_cut_into_words_is_refused(cut, message, reference, tmp_path):
    write_gguf(tmp_path / "cut.gguf", reference, cut=cut)
    with pytest.raises(FetchError, match=message):
        GgufCheckpoint(tmp_path / "cut.gguf", "cut")
