"""What the torch backend refuses, and what its messages name.

The slow case would catch a step that runs out of memory and does not say what would fit.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from redraft.engines import load_engine
from redraft.engines.cuda.graphs import CudaGraphCache
from redraft.engines.memory import cache_bytes, output_bytes
from redraft.errors import BundleError
from redraft.plugins.cuda.compile import nvcc
from tests.engines.draws import draft_batch
from tests.engines.tiny import LIMITS, METHOD, chain, make_batch, tiny_bundle, tiny_drafter_of


def test_a_bundle_of_another_torch_names_the_command(bundle, monkeypatch):
    monkeypatch.setattr("redraft.engines.torch.load_program", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr("torch.__version__", "2.11.1+cu130")
    with pytest.raises(BundleError, match=r"torch 2\.\d+.*2\.11\.1.*: \S*redraft build"):
        load_engine(bundle)
    versions = bundle.manifest.versions | {"torch": "2.11.0"}
    manifest = bundle.manifest.model_copy(update={"versions": versions})
    with pytest.raises(pytest.fail.Exception):
        load_engine(dataclasses.replace(bundle, manifest=manifest))


def test_what_a_gpu_cannot_run_is_refused(bundle, find_gpu, monkeypatch):
    find_gpu("Tesla T4", (7, 5))
    with pytest.raises(BundleError, match=r"Tesla T4 .*7\.5: .* 8\.0"):
        load_engine(bundle)
    find_gpu("B200", (10, 0))
    with pytest.raises(BundleError, match=r"size 32.*\(64, 96, 128, 256\).*CUDA_VISIBLE_DEVICES"):
        load_engine(bundle)
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    nvcc.cache_clear()
    with pytest.raises(BundleError, match=r"nvcc not found at NVCC=/nowhere/nvcc.*pip install"):
        load_engine(bundle)
    nvcc.cache_clear()


def test_too_little_memory_of_a_gpu_says_what_would_fit(bundle, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("redraft.engines.torch.available_device", lambda: torch.device("cuda"))
    monkeypatch.setattr("redraft.engines.torch.require_kernels", lambda *_: None)
    monkeypatch.setattr("redraft.engines.torch.available_graphs", lambda _: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "the GPU")
    monkeypatch.setattr("redraft.engines.memory.DRAW_BYTES", 0)  # of so small a target more than all the rest
    size = sum(file.stat().st_size for file in bundle.path.glob("*.pt2"))
    least = size + cache_bytes(bundle.config) + output_bytes(bundle.config)
    loads = []
    monkeypatch.setattr("redraft.engines.torch.load_program", lambda *_: loads.append(0) or full())
    for free, remedy in (
        (least, r"--slots \d would fit"),
        (least - 1, r"--slots \d would fit"),
        (size, "no limits would fit beside the weights"),
    ):
        monkeypatch.setattr("redraft.engines.cuda.device.free_bytes", lambda _, free=free: free)
        with pytest.raises(
            BundleError, match=rf"does not fit this GPU: about .* \(weights {size / 1e9:.2f}.*; {remedy}"
        ):
            load_engine(bundle)
    assert len(loads) == 1, "what cannot fit is refused before anything is loaded"


@pytest.mark.slow
def test_too_little_memory_of_a_gpu_in_a_step_says_so_too(target, monkeypatch, tmp_path):
    """In the target's, in both of a drafter's, and where tokens are chosen."""
    options = {"trained": tiny_drafter_of(target, "hidden_state"), "resample_above": 0}
    engine = load_engine(tiny_bundle(tmp_path, target, "torch", **options))
    drafter, tree = engine.drafters[METHOD], make_batch([chain(0, [], [5, 6, 7])])

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def refused(call):
        with pytest.raises(BundleError, match=r"does not fit this GPU: about .* GB are needed"):
            call()

    with monkeypatch.context() as patch:
        patch.setattr("redraft.engines.torch.sample", full)
        refused(lambda: engine.execute(tree))
    monkeypatch.setattr(CudaGraphCache, "eager", full)
    fits_no_bucket = make_batch([chain(slot, [], [5] * 45) for slot in range(LIMITS.slots)])
    refused(lambda: engine.execute(fits_no_bucket))
    monkeypatch.setattr(CudaGraphCache, "__call__", full)
    refused(lambda: drafter.draft(draft_batch(3)))
    refused(lambda: drafter.resample([np.zeros((1, 50), np.float32)], np.zeros(1, np.int32)))


def test_batches_outside_of_the_limits_are_refused_before_the_kernels_see_them(bundle, monkeypatch):
    """The CUDA kernels clamp, and say nothing."""
    engine = load_engine(bundle)
    monkeypatch.setattr(CudaGraphCache, "__call__", lambda *_: pytest.fail("executed"))
    batch = make_batch([chain(0, [], [5, 6, 7])])
    batch.slots = np.full(1, LIMITS.slots, np.int32)
    with pytest.raises(ValueError, match="slots"):
        engine.execute(batch)
