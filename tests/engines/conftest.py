from __future__ import annotations

import pytest
import torch

from redraft.bundle.manifest import Bundle
from redraft.model_defs.target.model import Target
from tests.engines.tiny import tiny_bundle, tiny_target


@pytest.fixture(scope="session", autouse=True)
def torch_on_the_cpu():
    """Also where there is a GPU: the tiny models' heads are not the CUDA kernels'."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redraft.engines.torch.available_device", lambda: torch.device("cpu"))
        yield


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="session")
def fp32_bundle(target, tmp_path_factory) -> Bundle:
    return tiny_bundle(tmp_path_factory.mktemp("fp32"), target)
