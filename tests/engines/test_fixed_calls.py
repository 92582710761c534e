"""Calls of fixed shapes: what is padded, what is prepared once, and that preparing changes nothing."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from redraft.engines import fixed_calls, transfer
from redraft.engines.fixed_calls import FixedCalls, padded_size
from redraft.engines.transfer import Results

CPU = torch.device("cpu")


def test_sizes_waste_a_third_at_most_and_are_few():
    sizes = [padded_size(count, 1000) for count in range(1, 1001)]
    assert sorted(set(sizes)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000]
    assert all(count <= size < 1.5 * count for count, size in enumerate(sizes, 1))


def calls(seen: list[dict], **options) -> FixedCalls:
    def function(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        seen.append({name: tensor.clone() for name, tensor in inputs.items()})
        return [inputs["x"] * 2, inputs["row_offsets"]]

    return FixedCalls(function, CPU, **options)


def inputs(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(count)
    x = rng.standard_normal((count, 3)).astype(np.float32)
    return {"x": x, "row_offsets": np.arange(count + 1, dtype=np.int32), "slots": np.arange(count, dtype=np.int32)}


def test_inputs_are_padded_and_stale_ones_are_not_seen():
    seen: list[dict] = []
    fixed = calls(seen, padding={"slots": 7}, idle={"row_offsets": np.array([0, 1], np.int32)})
    rows = {"x": 6, "row_offsets": 7, "slots": 6}
    for count in (6, 5):
        given = inputs(count)
        doubled, offsets = (found.numpy() for found in fixed(given, rows))
        np.testing.assert_array_equal(doubled[:count], 2 * given["x"])
        assert not doubled[count:].any()
        np.testing.assert_array_equal(offsets, [*range(count + 1), *[count] * (6 - count)])
        assert seen[-1]["slots"].tolist() == [*range(count), *[7] * (6 - count)]
        assert seen[-1]["x"].dtype == torch.float32
        assert seen[-1]["slots"].dtype == torch.int32


def test_a_shape_is_prepared_once_with_padding_alone():
    seen: list[dict] = []
    fixed = calls(seen, padding={"slots": 7}, idle={"row_offsets": np.array([0, 1], np.int32)})
    for count in (3, 2, 3, 1):
        fixed(inputs(count), {"x": 3, "row_offsets": 4, "slots": 3})
    assert (len(fixed), len(seen)) == (1, 5)
    assert not seen[0]["x"].any()
    assert seen[0]["row_offsets"].tolist() == [0, 1, 1, 1]
    assert seen[0]["slots"].tolist() == [7, 7, 7]
    fixed(inputs(4), {})
    assert len(fixed) == 2


def test_inputs_lie_where_16_bytes_can_be_loaded():
    places: list[int] = []
    fixed = FixedCalls(lambda given: places.extend(x.data_ptr() for x in given.values()) or [given["x"]], CPU)
    fixed(inputs(5), {})
    assert len({place % 16 for place in places}) == 1


class StandIn:
    """torch, whose GPU is the CPU's memory: a graph runs its function again."""

    def __init__(self, function) -> None:
        self.function, self.cuda, self.events = function, self, list[str]()
        self.inputs: dict[str, torch.Tensor] = {}

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

    def graph(self, graph: StandIn, pool: object, capture_error_mode: str):
        self.events.append(f"capture into {pool}")
        return nullcontext()

    def run(self, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        self.inputs = inputs
        self.outputs = self.function(inputs)
        return self.outputs

    def replay(self) -> None:
        self.events.append("replay")
        for output, new in zip(self.outputs, self.function(self.inputs), strict=True):
            output.copy_(new)


def test_a_graph_is_captured_once_and_only_fetching_waits(monkeypatch):
    """The path of a GPU, with a stand-in for one: inputs are there before the graph runs, results after it."""
    gpu, device = StandIn(lambda given: [given["x"] * 2, given["slots"] + 1]), SimpleNamespace(type="cuda")
    monkeypatch.setattr(fixed_calls, "torch", gpu)
    monkeypatch.setattr(transfer, "torch", gpu)
    fixed, results = FixedCalls(gpu.run, device, graph_pool="pool", padding={"slots": 9}), Results(device)
    kept = []
    for count in (3, 2, 4):
        given = inputs(count)
        doubled, slots = results.fetch(fixed(given, {"x": 4, "row_offsets": 5, "slots": 4}))
        np.testing.assert_array_equal(doubled, np.pad(2 * given["x"], ((0, 4 - count), (0, 0))))
        assert slots.tolist() == [*range(1, count + 1), *[10] * (4 - count)]
        kept.append(doubled)
    assert kept[0] is not kept[1]
    assert np.shares_memory(kept[0], kept[1])
    assert gpu.events == ["order", "order", "wait", "capture into pool", *["replay", "wait"] * 3]


def test_what_is_on_the_device_stays_there(monkeypatch):
    """Tensors go to the buffers of a GPU without the host's, padding behind them; a first call has padding alone."""
    gpu, device = StandIn(lambda given: [given["x"] * 2, given["slots"] + 1]), SimpleNamespace(type="cuda")
    monkeypatch.setattr(fixed_calls, "torch", gpu)
    seen: list[np.ndarray] = []
    fixed = FixedCalls(lambda given: seen.append(given["x"].numpy().copy()) or gpu.run(given), device)
    for count in (3, 2):
        given = inputs(count) | {"x": torch.from_numpy(inputs(count)["x"])}
        doubled, slots = fixed(given, {"x": 4, "row_offsets": 5, "slots": 4})
        np.testing.assert_array_equal(doubled, np.pad(2 * given["x"].numpy(), ((0, 4 - count), (0, 0))))
        assert slots.tolist() == [*range(1, count + 1), *[1] * (4 - count)]
    assert not seen[0].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_gives_what_the_function_gives():
    device = torch.device("cuda")
    fixed, results = FixedCalls(lambda given: [given["x"] * 2, given["slots"] + 1], device), Results(device)
    for count in (5, 3):
        given = inputs(count)
        doubled, slots = results.fetch(fixed(given, {"x": 6, "slots": 6}))
        np.testing.assert_array_equal(doubled[:count], 2 * given["x"])
        np.testing.assert_array_equal(slots[:count], given["slots"] + 1)


@pytest.mark.parametrize("most", [2, 0])
def test_where_memory_does_not_suffice_other_shapes_are_given_up(monkeypatch, most):
    """Room for the calls of two shapes, or of none."""
    fixed, capture = calls([]), fixed_calls._FixedCall.capture

    def capture_where_there_is_room(*arguments) -> None:
        if len(fixed) >= most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        capture(*arguments)

    monkeypatch.setattr(fixed_calls._FixedCall, "capture", capture_where_there_is_room)
    if not most:
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            fixed(inputs(3), {})
        return
    kept = []
    for count in (3, 2, 4, 3):
        given = inputs(count)
        np.testing.assert_array_equal(fixed(given, {})[0], 2 * given["x"])
        kept.append(len(fixed))
    assert kept == [1, 2, 1, 2]


def test_a_rank_does_not_try_again(monkeypatch):
    """Others would wait for it in another sum."""
    fixed, tries = calls([], tries_again=False), []

    def capture(*_) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    fixed(inputs(3), {})
    monkeypatch.setattr(fixed_calls._FixedCall, "capture", capture)
    with pytest.raises(torch.OutOfMemoryError):
        fixed(inputs(2), {})
    assert len(tries) == 1
    assert len(fixed) == 1
