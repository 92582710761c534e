"""Files of weights: their permissions, what a failed write leaves, and what is said of files that hold none."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from redraft.model_defs import files
from redraft.model_defs.files import load_pickled, read_tensors, save_tensors
from tests.conftest import ROOT


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_weights_have_the_permissions_of_any_other_new_file(tmp_path, umask):
    save_tensors({"a": torch.ones(3)}, tmp_path / "a.safetensors", {"format": "pt"})
    save_tensors({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], torch.zeros(3))
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    save_tensors({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    shared = torch.ones(4)
    with pytest.raises(RuntimeError, match="share memory"):
        save_tensors({"a": shared, "b": shared}, tmp_path / "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    assert load_file(tmp_path / "a.safetensors").keys() == {"a"}


def test_a_failed_write_names_the_file(tmp_path, monkeypatch):
    missing = tmp_path / "missing" / "a.safetensors"
    with pytest.raises(FileNotFoundError, match=re.escape(str(missing))):
        save_tensors({"a": torch.ones(3)}, missing)

    error = "Error while serializing: I/O error: No space left on device (os error 28)"

    def full(_, path, __):
        path.write_bytes(b"half")
        raise SafetensorError(error)

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '.*/a.safetensors'"):
        save_tensors({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    error = "no such dtype"
    with pytest.raises(OSError, match=r"no such dtype: '.*/a.safetensors'"):
        save_tensors({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_write_has_left_is_removed(tmp_path):
    killed, at_work = tmp_path / ".tmpZKg8Oe", tmp_path / ".tmpabcdef"
    for path in (killed, at_work):
        path.touch()
    os.utime(killed, (0, 0))
    save_tensors({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", at_work.name}


@pytest.mark.parametrize(
    ("name", "read"),
    [("a.safetensors", read_tensors), ("a.bin", load_pickled), ("a.bin", partial(load_pickled, mmap=True))],
)
def test_a_git_lfs_pointer_is_called_so(tmp_path, name, read):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 123\n")
    with pytest.raises(ValueError, match=f"{name} is a git-lfs pointer .* `git lfs pull` in its folder"):
        read(tmp_path / name)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_both_formats_of_torch_are_read(tmp_path, zipped, mmap):
    torch.save({"a": torch.ones(3)}, tmp_path / "a.bin", _use_new_zipfile_serialization=zipped)
    assert torch.equal(load_pickled(tmp_path / "a.bin", mmap=mmap)["a"], torch.ones(3))


def test_nothing_else_writes_safetensors():
    folders = ("build", "model_defs", "benchmarks", "redraft")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    writers = {str(file.relative_to(ROOT)) for file in files if "save_file" in names_imported(file)}
    assert writers == {"model_defs/files.py"}


def names_imported(file: Path) -> set[str]:
    """Names that a module imports from elsewhere."""
    nodes = ast.walk(ast.parse(file.read_text()))
    return {name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
