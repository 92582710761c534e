"""Bundles of the torch backend, and graphs on a GPU that there is not."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import slow_but
from tests.engines.cuda.graphs import FakeGraphs
from tests.engines.tiny import tiny_bundle, tiny_drafter_of, tiny_target

KINDS = ["recurrent", "hidden_state", "eagle3", "draft_lm, model"]


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    return tiny_bundle(tmp_path_factory.mktemp("torch"), tiny_target(), backend="torch")


@pytest.fixture(scope="module", params=slow_but(["recurrent"], KINDS))
def bundle_of_kind(request, target, tmp_path_factory):
    """A bundle with a drafter, one of each kind."""
    trained = tiny_drafter_of(target, request.param)
    return tiny_bundle(tmp_path_factory.mktemp("kind"), target, "torch", trained=trained)


@pytest.fixture
def graphs(monkeypatch):
    """A stand-in for CUDA graphs, which bundles are loaded with from now on."""
    graphs = FakeGraphs()
    monkeypatch.setattr("redraft.engines.torch.available_graphs", lambda _: graphs)
    return graphs


@pytest.fixture
def find_gpu(monkeypatch):
    """Makes the backend find a GPU of a name and a compute capability, which executes nothing."""

    def find(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr("redraft.engines.torch.available_device", lambda: torch.device("cuda"))
        monkeypatch.setattr("torch.cuda.get_device_name", lambda _: name)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)

    return find
