"""Files of weights: their permissions, and that a failed write leaves the old one."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model_defs.files import save_tensors
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


def test_nothing_else_writes_safetensors():
    folders = ("build", "compiler", "training", "model_defs", "benchmarks", "redraft")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    writers = {str(file.relative_to(ROOT)) for file in files if "save_file" in names_imported(file)}
    assert writers == {"model_defs/files.py"}


def names_imported(file: Path) -> set[str]:
    """Names that a module imports from elsewhere."""
    nodes = ast.walk(ast.parse(file.read_text()))
    return {name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
