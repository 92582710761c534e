"""The example of docs/algorithms.md is a draft model and a construction that train, compile and draft."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model_defs.drafter import Drafter, Recipe
from model_defs.drafters import DRAFTERS
from model_defs.training import Labels, Trainer
from model_defs.windows import Windows
from redraft.decoding.construction import CONSTRUCTIONS, Draws, register_construction
from redraft.engines import load_engine
from redraft.engines.interface import DraftBatch
from tests.engines.tiny import METHOD, VOCAB, tiny_bundle, tiny_target

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
NAMES = (CONSTRUCTIONS, DRAFTERS, Drafter, Draws, Recipe, Tensor, dataclass, np, nn, register_construction, replace)


@pytest.fixture
def example():
    """The names that the page's code defines; what it registers is forgotten afterwards."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    scope = {name: value for name, value in globals().items() if any(value is known for known in NAMES)}
    scope["__name__"] = __name__
    known = [(registry, dict(registry)) for registry in (CONSTRUCTIONS, DRAFTERS)]
    exec(compile(code, str(PAGE), "exec"), scope)
    yield scope
    for registry, before in known:
        registry.clear()
        registry.update(before)


def test_the_example_is_trained_compiled_and_drafts(example, tmp_path):
    target = tiny_target()
    kind = DRAFTERS["bigram"]
    drafter = kind(kind.configure(target, VOCAB), target)
    trainer = Trainer(target, drafter, Labels.hard, 2, hidden_weight=0.0)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    # Every token t is followed by t + 1.
    tokens = torch.arange(40)[None].repeat(2, 1)
    windows = Windows(
        tokens,
        torch.zeros(2, 40, 96),
        torch.zeros(2, 40, dtype=torch.long),
        torch.arange(36).expand(2, 36),
        torch.ones(2, 36, dtype=torch.bool),
    )
    for _ in range(60):
        optimizer.zero_grad()
        trainer.loss(windows).backward()
        optimizer.step()
    bundle = tiny_bundle(tmp_path, target, trained=drafter.eval(), construction="confident")
    assert bundle.config.methods[METHOD].construction == "confident"
    roots = np.array([5, 17], np.int32)
    drafted = load_engine(bundle).drafters[METHOD].draft(DraftBatch.of_roots(np.zeros((2, 96), np.float32), roots))
    tree = CONSTRUCTIONS["confident"].build(drafted, roots, 8)
    for root, nodes in zip(roots.tolist(), tree.nodes, strict=True):
        assert [(root + 1, 0), (root + 2, 1)] == [(token, parent) for token, parent, _ in nodes[1:3]]
        assert all(score > np.log(0.05) for _, _, score in nodes)
        assert len(nodes) < len(CONSTRUCTIONS["best_first"].build(drafted, roots, 8).nodes[0])
