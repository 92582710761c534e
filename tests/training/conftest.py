"""A tiny random teacher, and what it has answered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import distill
from model_defs.target.config import TargetConfig
from model_defs.target.model import Target
from model_defs.target.rope import RopeConfig
from tests.engines.tiny import write_model
from tests.training.teacher import END, LETTERS, VOCAB, generate
from training.shards import write_shard


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    monkeypatch.setattr(distill, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _: LETTERS))


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = TargetConfig(VOCAB, 32, 48, 2, 4, 2, 8, 1e-5, RopeConfig(), 256, False, False, (END,))
    target = Target(config).eval().requires_grad_(False)
    target.embedding.weight.mul_(3)
    return target


@pytest.fixture(scope="module")
def taught(target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and, in `data`, three shards of its answers."""
    folder = tmp_path_factory.mktemp("taught")
    write_model(target, folder)
    (folder / "data").mkdir()
    for shard in range(3):
        docs = generate(target, 24, [[token] for token in range(10 + shard, 100, 3)])
        write_shard(folder / f"data/shard-{shard:05d}.safetensors", docs, {})
    return folder
