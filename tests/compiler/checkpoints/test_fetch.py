"""Fetching a target from each kind of source, and what bad sources are told."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import weakref
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from redraft import home
from redraft.bundle.writer import copy_tokenizer
from redraft.chat import ChatTemplate
from redraft.compiler.checkpoints import fetch as fetching
from redraft.compiler.checkpoints import writer
from redraft.compiler.checkpoints.folder import FolderCheckpoint
from redraft.compiler.checkpoints.gguf import GgufCheckpoint
from redraft.compiler.checkpoints.source import FetchError
from redraft.model_defs import files
from redraft.model_defs.files import INDEX, StoredTensors, weight_files
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target
from redraft.model_defs.weights.folder import GGUF
from tests.compiler.checkpoints.tiny_llama import (
    TEMPLATE,
    TOKENS,
    assert_complete,
    assert_same_model,
    fetch,
    index,
    pickle,
)
from tests.conftest import exit_code_of
from tests.model_defs.drafters.hub.forms import eagle, speculators

Usage = namedtuple("Usage", "total used free")


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
    pickle(source)
    (tmp_path / "template.jinja").write_text("own {{ messages }}")
    folder = fetch(source, tmp_path, template=tmp_path / "template.jinja")
    assert (folder / "chat_template.jinja").read_text() == "own {{ messages }}"
    assert_same_model(folder, reference)


def test_names_without_their_beginning(checkpoint, reference, tmp_path):
    source = tmp_path / "base"
    shutil.copytree(checkpoint, source)
    weights = load_file(source / "model.safetensors")
    save_file({name.removeprefix("model."): weight for name, weight in weights.items()}, source / "model.safetensors")
    assert_same_model(fetch(source, tmp_path), reference)


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


def test_a_source_that_has_changed_is_fetched_again(checkpoint, tmp_path, capsys):
    source, own = tmp_path / "mine", tmp_path / "template.jinja"
    shutil.copytree(checkpoint, source)
    own.write_text("own {{ messages }}\n")
    folder = fetch(source, tmp_path, template=own)
    weights = load_file(source / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, source / "model.safetensors")
    fetch(source, tmp_path)
    assert f"{source} has changed since {folder} was fetched" in capsys.readouterr().out
    (name, weight), *_ = weights.items()
    assert torch.equal(load_file(folder / "model.safetensors")[name], (weight + 1).bfloat16())
    assert (folder / "chat_template.jinja").read_text() == own.read_text(), "what was chosen for it stays"
    fetch(source, tmp_path)
    assert "reusing" in capsys.readouterr().out


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


def test_a_tokenizer_stays_what_its_file_says(checkpoint, tmp_path):
    """SmolLM2's: by the class that its configuration names, digits would not be words of their own."""
    source = tmp_path / "smollm"
    shutil.copytree(checkpoint, source)
    own = Tokenizer.from_file(str(source / "tokenizer.json"))
    own.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    own.save(str(source / "tokenizer.json"))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "GPT2Tokenizer"}))
    folder = fetch(source, tmp_path)
    found = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert str(found.pre_tokenizer) == str(own.pre_tokenizer)
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% nonsense %}", "warning: the chat template cannot be read: line 1: Encountered unknown tag 'nonsense'"),
        ("{{ 'a' * 3000000000 }}", "warning: the chat template takes more than"),
    ],
)
def test_a_template_that_cannot_be_used_is_said(checkpoint, tmp_path, capsys, template, said):
    (tmp_path / "template.jinja").write_text(template)
    folder = fetch(checkpoint, tmp_path, template=tmp_path / "template.jinja")
    assert said in capsys.readouterr().out
    assert (folder / "model.safetensors").is_file()


def test_templates_by_name_come_with_the_model(checkpoint, tmp_path, capsys):
    sources = {"default": "plain", "tool_use": "{{ tools }}"}
    old = tmp_path / "old"
    shutil.copytree(checkpoint, old)
    (old / "chat_template.jinja").unlink()
    settings = json.loads((old / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": name, "template": source} for name, source in sources.items()]
    (old / "tokenizer_config.json").write_text(json.dumps(settings))
    folder = fetch(old, tmp_path)
    assert (folder / "chat_template.jinja").read_text() == "plain"
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    (tmp_path / "bundle").mkdir()
    copy_tokenizer(folder, tmp_path / "bundle")
    for made in (folder, tmp_path / "bundle", fetch(folder, tmp_path, name="again")):
        template = ChatTemplate.load(made)
        assert template.render([{"role": "user", "content": "a"}]) == "plain"
        assert template.takes_tools
    assert "warning" not in capsys.readouterr().out


def test_a_drafter_of_the_package_is_for_one_models_weights(checkpoint, tmp_path, monkeypatch):
    """Under any name, and not for others of its name."""
    monkeypatch.setattr(home, "SHIPPED", tmp_path)
    monkeypatch.setattr(home, "HOME", tmp_path / "home")
    fingerprint = target_fingerprint(Target.from_folder(fetch(checkpoint, tmp_path)))
    shape = {"drafter": "recurrent", "hidden_size": 32, "vocab_size": len(TOKENS)}
    drafters = {
        "a": {"target_fingerprint": "another"},
        "b": {"target_fingerprint": fingerprint, "drafter": "eagle"},
        "c": {"target_fingerprint": fingerprint, "vocab_size": 999},
        "tiny-llama": {"target_fingerprint": "another"},
    }

    def ship(name: str, **config: object) -> Path:
        (tmp_path / "drafters" / name).mkdir(parents=True)
        (tmp_path / "drafters" / name / "config.json").write_text(json.dumps(shape | config))
        return tmp_path / "drafters" / name

    for name, config in drafters.items():
        ship(name, **config)
    other = fetch(checkpoint, tmp_path / "other")
    assert home.drafter_of(other) is None
    shipped = ship("d", target_fingerprint=fingerprint)
    found = fetch(checkpoint, tmp_path / "found")
    assert home.drafter_of(found) == shipped
    (other / "source.json").write_text("{}")  # of a version that noted nothing
    assert home.drafter_of(other) is None
    default, usual = tmp_path / home.DEFAULT_MODEL, ship(home.DEFAULT_MODEL, target_fingerprint="another")
    assert home.drafter_of(default) == usual
    own = shutil.copytree(shipped, home.own_drafter("tiny-llama"))
    assert home.drafter_of(found) == own


def test_another_source_under_the_same_name_needs_force(checkpoint, gguf_file, tmp_path):
    fetch(checkpoint, tmp_path, name="mine")
    with pytest.raises(FetchError, match=r"tiny-llama.*--name.*--replace"):
        fetch(gguf_file, tmp_path, name="mine")
    assert_complete(fetch(gguf_file, tmp_path, name="mine", replace=True), "tiny", GGUF)


UNREADABLE = '{"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}}'


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


def add_head(folder):
    """A head that drafts, in a model of its own."""
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.zeros(4, 4)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "is not a model folder: it has no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), r"no \.safetensors file \(and no"),
        (lambda f: truncate(f / "model.safetensors"), "truncated or corrupt"),
        (lambda f: (pickle(f), truncate(f / "pytorch_model.bin")), r"pytorch_model\.bin: truncated or corrupt"),
        (lambda f: (pickle(f), torch.save(partial(print, 1), f / "pytorch_model.bin")), "would run its code"),
        (lambda f: index(f, "one.safetensors", "two.safetensors"), r"two\.safetensors is missing; .* names it"),
        (lambda f: (f / "tokenizer.json").write_text(UNREADABLE), r"no usable tokenizer \(Token `b` out of vocabulary"),
        (lambda f: edit_config(f, hidden_size=40), r"has shape .*, expected"),
        (lambda f: edit_config(f, num_hidden_layers=3), r"'model\.layers\.2\..*' is missing"),
        (lambda f: (edit_config(f, model_type="qwen3_next"), add_head(f)), "Supported: Llama 2/3"),
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


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (speculators, r"holds a drafter, EAGLE-3 \(speculators\), and no model: .* --drafter .*source"),
        (eagle, "holds a drafter, EAGLE-1/2, and no model"),
        (lambda: speculators(speculators_model_type="mtp"), "holds a drafter that is recognised: MTP; not served yet"),
    ],
)
def test_a_drafter_is_no_model(tmp_path, form, message):
    with pytest.raises(ValueError, match=message):
        fetch(form().write(tmp_path / "source"), tmp_path)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_memory_disk_and_tokenizer_are_checked_before_weights_are_read(
    checkpoint, gguf_file, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(fetching, "write_weights", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(Path, "hardlink_to", failing(OSError("another file system")))
    given = checkpoint if kind == "folder" else gguf_file
    for place, value, message in (
        ("redraft.console.resources.most_bytes", lambda: 100_000, "fetching this model takes at least"),
        ("shutil.disk_usage", lambda path: Usage(10, 10, 0), "kB of disk, 0 kB are free"),
        ("transformers.PreTrainedTokenizerBase.from_pretrained", failing(OSError("cut")), "no usable tokenizer"),
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


@pytest.mark.parametrize("shard_bytes", [3_000, 10**9])
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
    monkeypatch.setattr(files, "CHUNK", 200)
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
    fetching.store(FolderCheckpoint(checkpoint, "a"), tmp_path, None, print)
    of_file = GgufCheckpoint(gguf_file, "a")
    of_file.files = {}  # as with an adapter, which is merged into floats
    fetching.store(of_file, tmp_path, None, print)
    assert 200 < most <= 400


def test_a_killed_fetch_leaves_the_model_that_was_there(checkpoint, reference, tmp_path, monkeypatch):
    folder, write = fetch(checkpoint, tmp_path), fetching.write_weights

    def kill(_: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(fetching, "write_weights", lambda out, shapes, blocks, _: write(out, shapes, blocks, kill))
        assert exit_code_of(lambda: fetch(checkpoint, tmp_path, replace=True)) == -signal.SIGKILL
    assert len(list(folder.parent.iterdir())) == 2, "the temporary folder is still there"
    assert_same_model(folder, reference)
    fetch(checkpoint, tmp_path, replace=True)
    assert_complete(folder, "tiny-llama")
