from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from redraft.plugins import kernels
from redraft.plugins.cuda import launch
from redraft.plugins.cuda.declaration import Kernel
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


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ON_GPU = pytest.param("gpu", marks=[pytest.mark.gpu, NO_GPU])


@pytest.fixture(params=["ascending", "descending", ON_GPU])
def run_kernel(request: pytest.FixtureRequest) -> Callable[..., list[torch.Tensor]]:
    """Runs a declared kernel on tensors of the CPU: as g++ compiles it, with blocks and threads in both orders, and on
    a GPU."""
    return on_gpu if request.param == "gpu" else partial(launch.run, descending=request.param == "descending")


def on_gpu(kernel: Kernel, inputs: Sequence[torch.Tensor], attributes: Mapping[str, int]) -> list[torch.Tensor]:
    """The kernel's outputs, copied back; an in-place output is its input."""
    there = dict(zip((argument.name for argument in kernel.inputs), (x.cuda() for x in inputs), strict=True))
    outputs = [output.cpu() for output in launch.run(kernel, list(there.values()), attributes)]
    here = dict(zip(there, inputs, strict=True))
    return [
        here[argument.in_place_of].copy_(output) if argument.in_place_of else output
        for argument, output in zip(kernel.outputs, outputs, strict=True)
    ]


@pytest.fixture(scope="module")
def core() -> ov.Core:
    """The import waits: the tests that need a GPU run where OpenVINO is not installed."""
    import openvino as ov

    core = ov.Core()
    core.add_extension(str(extension_path()))
    core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return core
