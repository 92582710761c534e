"""An LLM on a random target, whose bundle has no files: loaded as on a GPU, computed on the CPU."""

import pytest
import torch

from benchmarks.gpu.llama_7b import SHAPES
from benchmarks.gpu.scheduling import TREES, random_llm, serve
from redraft.batch import TargetBatch
from redraft.engines.cuda.graphs import CudaGraphCache
from redraft.engines.torch import TorchEngine
from redraft.errors import BundleError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Memory is counted as on a GPU."""

    def load(engine, bundle, rank, device, usual=TorchEngine._load):
        assert device == CUDA
        usual(engine, bundle, rank, CPU)

    monkeypatch.setattr(TorchEngine, "_load", load)
    monkeypatch.setattr("redraft.engines.torch.available_device", lambda: CUDA)
    monkeypatch.setattr("redraft.engines.torch.require_kernels", lambda *_: None)
    monkeypatch.setattr("redraft.engines.cuda.device.free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "no GPU")


def test_a_session_counts_the_memory_that_is_left(as_on_a_gpu, monkeypatch):
    """The weights are on the device already. Also a step that runs out of memory says what would fit."""
    llm = random_llm(SHAPES["tiny"], CPU, streams=2, max_len=8, nodes=3)
    assert serve(llm, 2, 4, 4, TREES, {})["tokens_per_s"] > 0

    def exhausted(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(CudaGraphCache, "__call__", exhausted)
    monkeypatch.setattr(CudaGraphCache, "eager", exhausted)
    with pytest.raises(BundleError, match=r"random does not fit this GPU: about .* \(weights 0.00, "):
        llm.runtime.engine.execute(TargetBatch.causal(1, 1, 0, 1))


def test_too_little_memory_is_refused_before_it_is_loaded(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr("redraft.engines.cuda.device.free_bytes", lambda _: 1000)
    with pytest.raises(BundleError, match="random does not fit this GPU"):
        random_llm(SHAPES["tiny"], CPU, streams=2, max_len=8, nodes=3)
