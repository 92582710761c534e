"""A tiny random teacher, and what it has answered."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from redraft.cli import distill
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target, give_layers
from redraft.model_defs.target.rope import RopeConfig
from redraft.training.shards import write_shard
from redraft.training.teacher_data import LAYERS
from tests.engines.tiny import write_model
from tests.training.teacher import END, LETTERS, VOCAB, generate


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    monkeypatch.setattr(distill, "load_tokenizer", lambda _: LETTERS)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = TargetConfig(VOCAB, 32, 48, 2, 4, 2, 8, 1e-5, RopeConfig(), 256, False, False, (END,))
    target = Target(config).eval().requires_grad_(False)
    target.embedding.weight.mul_(3)
    return target


@pytest.fixture(scope="module")
def taught(target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and, in `data`, three shards of its answers; in `layers`, two with what enters layers."""
    folder = tmp_path_factory.mktemp("taught")
    write_model(target, folder)
    deep = copy.deepcopy(target)
    give_layers(deep, (0, 1, 2))
    for name, teacher, shards, meta in (("data", target, 3, {}), ("layers", deep, 2, {LAYERS: "0+1+2"})):
        (folder / name).mkdir()
        for shard in range(shards):
            docs = generate(teacher, 24, [[token] for token in range(10 + shard, 100, 3)])
            write_shard(folder / f"{name}/shard-{shard:05d}.safetensors", docs, meta)
    return folder
