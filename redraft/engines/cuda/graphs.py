"""A CUDA graph cache: calls padded to a few shapes, with a graph for each. Inputs are staged in one copy; the host
never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

ALIGNED = 4
"""Inputs begin at multiples of this many 4-byte elements, which the kernels load at once."""
REPEATED = "row_offsets"
"""The input that is padded with its last value, so that padding sequences have no rows."""

Inputs = Mapping[str, np.ndarray | Tensor]
"""Arrays int32 or float32, or tensors that are on the device already."""
Sizes = Mapping[str, int]
"""First dimensions that inputs are padded to, by name; an input without an entry keeps its own."""
Function = Callable[[dict[str, Tensor]], Sequence[Tensor]]
"""Tensors by name to results, whose first dimensions may differ between shapes."""


class Graphs(Protocol):
    """Makes CUDA graphs."""

    def warm_up(self, function: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Run a function that is about to be captured, and wait for its results."""
        ...

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record what a function enqueues, without running it. Returns a function that enqueues it again."""
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool. They must not run at the same time. A graph takes little more memory than
    those captured before it if none of these is smaller: capture the largest first."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream()  # one for all, as cuBLAS keeps a workspace for each stream

    def warm_up(self, function: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            results = function()
        torch.cuda.current_stream().wait_stream(self._beside)
        torch.cuda.current_stream().synchronize()
        return results

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        return graph.replay


def available_graphs(device: torch.device) -> Graphs | None:
    """The capturer of CUDA graphs on a GPU; None on the CPU."""
    return CudaGraphs() if device.type == "cuda" else None


class CudaGraphCache:
    """Runs a function at padded shapes, on a GPU as CUDA graphs, on the CPU directly.

    A call only enqueues: before the next one the host must have waited for the device. Inputs are padded with
    `padding`, or with 0. A shape is captured from a call with nothing but padding and the inputs of `idle`, so that it
    changes nothing that another call would read. The results of all graphs share the memory of the largest graph's.
    """

    def __init__(
        self,
        function: Function,
        device: torch.device,
        graphs: Graphs | None = None,
        padding: Mapping[str, float] | None = None,
        idle: Mapping[str, np.ndarray] | None = None,
    ):
        """`graphs` None: the function is called each time, as on the CPU."""
        self._function, self._device, self._graphs = function, device, graphs
        self._padding, self._idle = dict(padding or {}), dict(idle or {})
        self._calls: dict[tuple[tuple[int, ...], ...], _PaddedCall] = {}
        self.outputs: list[Tensor] = []
        """The memory that all graphs' results share: those of the largest graph."""

    def prepare(self, inputs: Inputs, buckets: Iterable[Sizes]) -> None:
        """Capture these shapes in this order. `inputs` give names, dtypes and the other dimensions."""
        for sizes in buckets:
            self._call(inputs, sizes)

    def __call__(self, inputs: Inputs, sizes: Sizes) -> Sequence[Tensor]:
        """Run on inputs padded to `sizes`. The results stay on the device and are valid until the next call. A shape
        that was not prepared is captured first."""
        call = self._call(inputs, sizes)
        call.inputs.fill(inputs, self._padding)
        return call.run()

    def eager(self, inputs: Inputs) -> Sequence[Tensor]:
        """Run on inputs of any shape, without padding or graph."""
        staged = StagedInputs(_shapes(inputs, {}), inputs, self._device)
        staged.fill(inputs, {})
        return self._function(staged.tensors)

    def __len__(self) -> int:
        return len(self._calls)

    def _call(self, inputs: Inputs, sizes: Sizes) -> _PaddedCall:
        shapes = _shapes(inputs, sizes)
        key = tuple(shapes.values())
        if key not in self._calls:
            staged = StagedInputs(shapes, inputs, self._device)
            run = self._captured(inputs, staged) if self._graphs else lambda: self._function(staged.tensors)
            self._calls[key] = _PaddedCall(staged, run)
        return self._calls[key]

    def _captured(self, inputs: Inputs, staged: StagedInputs) -> Callable[[], Sequence[Tensor]]:
        assert self._graphs is not None
        staged.fill({name: self._idle.get(name, tensor[:0]) for name, tensor in inputs.items()}, self._padding)
        views = self._room_for(self._graphs.warm_up(lambda: self._function(staged.tensors)))

        def step() -> None:
            for view, result in zip(views, self._function(staged.tensors), strict=True):
                view.copy_(result)

        replay = self._graphs.capture(step)

        def run() -> Sequence[Tensor]:
            replay()
            return views

        return run

    def _room_for(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Views of `outputs` with the results' shapes. Larger results replace `outputs` by new memory; graphs that were
        captured before keep the old one."""
        if not self.outputs or any(len(new) > len(old) for new, old in zip(results, self.outputs, strict=True)):
            self.outputs = [torch.empty_like(result) for result in results]
        return [output[: len(result)] for output, result in zip(self.outputs, results, strict=True)]


class _PaddedCall:
    """The staged inputs of one shape, and a function that runs on them."""

    def __init__(self, inputs: StagedInputs, run: Callable[[], Sequence[Tensor]]):
        self.inputs, self.run = inputs, run


class StagedInputs:
    """Input buffers of one shape. Arrays stand back to back in one pinned host buffer and its device copy, on the CPU
    the same memory; tensors have their own."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], inputs: Inputs, device: torch.device):
        self._on_gpu = device.type == "cuda"
        sizes = {name: int(np.prod(shapes[name])) for name, x in inputs.items() if isinstance(x, np.ndarray)}
        starts = np.cumsum([0, *(-(-size // ALIGNED) * ALIGNED for size in sizes.values())]).tolist()
        self._host = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=self._on_gpu)
        self._device = torch.zeros(starts[-1], dtype=torch.int32, device=device) if self._on_gpu else self._host
        slices = {name: slice(start, start + sizes[name]) for name, start in zip(sizes, starts, strict=False)}
        self._arrays: dict[str, np.ndarray] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in inputs.items():
            if isinstance(tensor, np.ndarray):
                dtype = torch.from_numpy(tensor[:0]).dtype
                staged, buffer = (x[slices[name]].view(dtype).view(shapes[name]) for x in (self._host, self._device))
                self._arrays[name], self.tensors[name] = staged.numpy(), buffer
            else:
                self.tensors[name] = torch.zeros(shapes[name], dtype=tensor.dtype, device=device)

    def fill(self, inputs: Inputs, padding: Mapping[str, float]) -> None:
        """Copy the inputs into the buffers, followed by padding."""
        for name, array in inputs.items():
            if isinstance(array, np.ndarray):
                buffer, rows = self._arrays[name], len(array)
                buffer[:rows] = array
                buffer[rows:] = (array[-1] if rows else 0) if name == REPEATED else padding.get(name, 0)
        if self._on_gpu:
            self._device.copy_(self._host, non_blocking=True)
        for name, tensor in inputs.items():
            if not isinstance(tensor, np.ndarray):
                self.tensors[name][: len(tensor)].copy_(tensor)
                self.tensors[name][len(tensor) :].fill_(padding.get(name, 0))


def _shapes(inputs: Inputs, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    return {name: (sizes.get(name, len(tensor)), *tensor.shape[1:]) for name, tensor in inputs.items()}
