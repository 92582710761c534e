from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from redraft.plugins import kernels
from redraft.plugins.library import extension_path

if TYPE_CHECKING:
    import openvino as ov

ISAS = ("avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        kernels.select_isa(request.param)
    except ValueError as error:
        if "this machine lacks it" not in str(error):
            raise
        pytest.skip(str(error))
    yield request.param
    kernels.select_isa(os.environ.get("REDRAFT_ISA"))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="module")
def core() -> ov.Core:
    """The import waits: the tests that need a GPU run where OpenVINO is not installed."""
    import openvino as ov

    core = ov.Core()
    core.add_extension(str(extension_path()))
    core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return core
