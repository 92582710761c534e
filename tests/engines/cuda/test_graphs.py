"""Calls of fixed shapes: what is padded, what is prepared once, and that preparing changes nothing."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from redraft.engines.cuda import graphs as graphs_module
from redraft.engines.cuda import transfer
from redraft.engines.cuda.graphs import CudaGraphCache, CudaGraphs
from redraft.engines.cuda.transfer import Results
from tests.engines.cuda.graphs import FakeGraphs

CPU = torch.device("cpu")


def calls(seen: list[dict], **options) -> CudaGraphCache:
    def function(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        seen.append({name: tensor.clone() for name, tensor in inputs.items()})
        return [inputs["x"] * 2, inputs["row_offsets"]]

    return CudaGraphCache(function, CPU, **options)


def inputs(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(count)
    x = rng.standard_normal((count, 3)).astype(np.float32)
    return {"x": x, "row_offsets": np.arange(count + 1, dtype=np.int32), "slots": np.arange(count, dtype=np.int32)}


def test_inputs_are_padded_and_stale_ones_are_not_seen():
    seen: list[dict] = []
    cache = calls(seen, padding={"slots": 7}, idle={"row_offsets": np.array([0, 1], np.int32)})
    rows = {"x": 6, "row_offsets": 7, "slots": 6}
    for count in (6, 5):
        given = inputs(count)
        doubled, offsets = (found.numpy() for found in cache(given, rows))
        np.testing.assert_array_equal(doubled[:count], 2 * given["x"])
        assert not doubled[count:].any()
        np.testing.assert_array_equal(offsets, [*range(count + 1), *[count] * (6 - count)])
        assert seen[-1]["slots"].tolist() == [*range(count), *[7] * (6 - count)]
        assert seen[-1]["x"].dtype == torch.float32
        assert seen[-1]["slots"].dtype == torch.int32


def test_a_shape_is_captured_once_from_padding_only():
    seen: list[dict] = []
    graphs = FakeGraphs()
    cache = calls(seen, graphs=graphs, padding={"slots": 7}, idle={"row_offsets": np.array([0, 1], np.int32)})
    sizes = {"x": 3, "row_offsets": 4, "slots": 3}
    cache.prepare(inputs(1), [sizes])
    assert len(seen) == 2
    for idle in seen:
        assert not idle["x"].any()
        assert idle["row_offsets"].tolist() == [0, 1, 1, 1]
        assert idle["slots"].tolist() == [7, 7, 7]
    for count in (3, 2, 3, 1):
        cache(inputs(count), sizes)
    assert (len(cache), graphs.captured, len(seen)) == (1, 1, 6)
    cache(inputs(4), {})
    assert (len(cache), graphs.captured) == (2, 2)


@pytest.mark.parametrize("counts", [(6, 4, 2), (2, 4, 6), (4, 6, 2)])
def test_results_of_all_graphs_lie_in_the_largest_ones_memory(counts):
    """Captured from the largest down they share it. In any order each has its own results, until the next call."""
    cache = calls([], graphs=FakeGraphs())
    cache.prepare(inputs(1), [{"x": count, "row_offsets": count + 1, "slots": count} for count in counts])
    places = set()
    for count in (2, 6, 4, 6, 2):
        given = inputs(count)
        doubled, offsets = cache(given, {})
        np.testing.assert_array_equal(doubled, 2 * given["x"])
        assert offsets.tolist() == given["row_offsets"].tolist()
        places.add((doubled.data_ptr(), offsets.data_ptr()))
    assert [len(output) for output in cache.outputs] == [6, 7]
    if counts[0] == 6:
        assert places == {tuple(output.data_ptr() for output in cache.outputs)}
        small = cache(inputs(2), {})[0]
        before = small.clone()
        cache(inputs(4), {})
        assert not torch.equal(small, before)


class StandIn:
    """torch, whose GPU is the CPU's memory: a graph runs its function again."""

    def __init__(self) -> None:
        self.cuda, self.events = self, list[str]()

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def zeros(self, *size, pin_memory=False, device=None, dtype=None) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype)

    def empty(self, *size, pin_memory=False, dtype=None) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype)

    def current_stream(self) -> StandIn:
        return self

    Stream = CUDAGraph = current_stream

    def wait_stream(self, other: StandIn) -> None:
        self.events.append("order")

    def synchronize(self) -> None:
        self.events.append("wait")

    def stream(self, stream: StandIn):
        return nullcontext()

    def graph_pool_handle(self) -> str:
        return "pool"

    def graph(self, graph: StandIn, pool: object, capture_error_mode: str):
        self.events.append(f"capture into {pool}")
        return nullcontext()

    def graphs(self) -> CudaGraphs:
        """Those whose functions a replay runs again."""
        graphs = CudaGraphs()
        capture = graphs.capture

        def captured(function):
            self.captured = function
            return capture(function)

        graphs.capture = captured
        return graphs

    def replay(self) -> None:
        self.events.append("replay")
        self.captured()


def test_a_graph_is_captured_once_and_only_fetching_waits(monkeypatch):
    """The path of a GPU, with a stand-in for one: inputs are there before the graph runs, results after it."""
    gpu, device = StandIn(), SimpleNamespace(type="cuda")
    monkeypatch.setattr(graphs_module, "torch", gpu)
    monkeypatch.setattr(transfer, "torch", gpu)
    function = lambda given: [given["x"] * 2, given["slots"] + 1]  # noqa: E731
    cache, results = CudaGraphCache(function, device, gpu.graphs(), padding={"slots": 9}), Results(device)
    kept = []
    for count in (3, 2, 4):
        given = inputs(count)
        doubled, slots = results.fetch(cache(given, {"x": 4, "row_offsets": 5, "slots": 4}))
        np.testing.assert_array_equal(doubled, np.pad(2 * given["x"], ((0, 4 - count), (0, 0))))
        assert slots.tolist() == [*range(1, count + 1), *[10] * (4 - count)]
        kept.append(doubled)
    assert kept[0] is not kept[1]
    assert np.shares_memory(kept[0], kept[1])
    assert gpu.events == ["order", "order", "wait", "capture into pool", *["replay", "wait"] * 3]


def test_what_is_on_the_device_stays_there(monkeypatch):
    """Tensors go to the buffers of a GPU without the host's, padding behind them; a first call has padding alone."""
    gpu, device = StandIn(), SimpleNamespace(type="cuda")
    monkeypatch.setattr(graphs_module, "torch", gpu)
    seen: list[np.ndarray] = []

    def function(given):
        seen.append(given["x"].numpy().copy())
        return [given["x"] * 2, given["slots"] + 1]

    cache = CudaGraphCache(function, device, gpu.graphs())
    for count in (3, 2):
        given = inputs(count) | {"x": torch.from_numpy(inputs(count)["x"])}
        doubled, slots = cache(given, {"x": 4, "row_offsets": 5, "slots": 4})
        np.testing.assert_array_equal(doubled, np.pad(2 * given["x"].numpy(), ((0, 4 - count), (0, 0))))
        assert slots.tolist() == [*range(1, count + 1), *[1] * (4 - count)]
    assert not seen[0].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_gives_what_the_function_gives():
    device = torch.device("cuda")
    cache = CudaGraphCache(lambda given: [given["x"] * 2, given["slots"] + 1], device, CudaGraphs())
    cache.prepare(inputs(1), [{"x": size, "slots": size} for size in (6, 4)])
    results = Results(device)
    for count in (5, 3):
        given, size = inputs(count), 6 if count > 4 else 4
        doubled, slots = results.fetch(cache(given, {"x": size, "slots": size}))
        np.testing.assert_array_equal(doubled[:count], 2 * given["x"])
        np.testing.assert_array_equal(slots[:count], given["slots"] + 1)
