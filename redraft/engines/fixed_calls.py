"""Calls of fixed shapes: inputs staged in one copy, on a GPU a CUDA graph, results behind one wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNED = 4
"""Inputs begin at multiples of so many elements of 4 bytes: what the kernels load at once."""
REPEATED = "row_offsets"
"""Padded with its last value, so that the sequences behind it have no rows."""

GraphPool = Any
"""Memory that CUDA graphs share: what `torch.cuda.graph_pool_handle` gives."""
Arrays = Mapping[str, np.ndarray]
Function = Callable[[dict[str, Tensor]], Sequence[Tensor]]
"""Tensors by name, int32 or float32, to results; those are read before the next call."""


def padded_size(count: int, most: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds `count`, and at most `most`."""
    size = 1 << (count - 1).bit_length()
    return min(3 * size // 4 if size > 3 and 3 * size // 4 >= count else size, most)


class FixedCalls:
    """A function at every shape that is asked for: made when first needed, then kept.

    `padding` is what inputs are padded with, 0 where it names none. A new shape's first call has padding alone and the
    inputs of `idle`, so that it changes nothing that another would read.
    """

    def __init__(
        self,
        function: Function,
        device: torch.device,
        graph_pool: GraphPool | None = None,
        padding: Mapping[str, float] | None = None,
        idle: Arrays | None = None,
    ):
        self._function, self._device, self._pool = function, device, graph_pool
        self._padding, self._idle = dict(padding or {}), dict(idle or {})
        self._calls: dict[tuple[tuple[int, ...], ...], _FixedCall] = {}
        self._results = _Results()

    def __call__(self, inputs: Arrays, rows: Mapping[str, int]) -> list[np.ndarray]:
        """The results for inputs padded to the first dimensions in `rows`, where it names them; views that stay valid
        until the next call."""
        shapes = {name: (rows.get(name, len(array)), *array.shape[1:]) for name, array in inputs.items()}
        key = tuple(shapes.values())
        if key not in self._calls:
            self._calls[key] = self._made(inputs, shapes)
        call = self._calls[key]
        call.fill(inputs, self._padding)
        return call.run()

    def __len__(self) -> int:
        return len(self._calls)

    def _made(self, inputs: Arrays, shapes: dict[str, tuple[int, ...]]) -> _FixedCall:
        call = _FixedCall(shapes, {name: array.dtype for name, array in inputs.items()}, self._device, self._results)
        call.fill({name: self._idle.get(name, array[:0]) for name, array in inputs.items()}, self._padding)
        call.capture(self._function, self._pool)
        return call


class _Results:
    """Pinned memory for each output that calls of all shapes give in turn, of the largest one's size."""

    def __init__(self) -> None:
        self._pinned: dict[int, Tensor] = {}

    def fetch(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Enqueue copies of the outputs; they are there once the stream has been waited for."""
        return [self._place(number, output).copy_(output, non_blocking=True) for number, output in enumerate(outputs)]

    def _place(self, number: int, output: Tensor) -> Tensor:
        size = output.numel() * output.element_size()
        if number not in self._pinned or len(self._pinned[number]) < size:
            self._pinned[number] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._pinned[number][:size].view(output.dtype).view(output.shape)


class _FixedCall:
    """Buffers of one shape: the inputs back to back, pinned on the host and on the device; on the CPU they are one."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, np.dtype],
        device: torch.device,
        results: _Results,
    ):
        self._on_gpu, self._results = device.type == "cuda", results
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        starts = np.cumsum([0, *(-(-size // ALIGNED) * ALIGNED for size in sizes)]).tolist()
        self._host = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=self._on_gpu)
        self._device = torch.zeros(starts[-1], dtype=torch.int32, device=device) if self._on_gpu else self._host
        self._arrays: dict[str, np.ndarray] = {}
        self._tensors: dict[str, Tensor] = {}
        for (name, shape), start, size in zip(shapes.items(), starts[:-1], sizes, strict=True):
            part, dtype = slice(start, start + size), torch.from_numpy(np.zeros(0, dtypes[name])).dtype
            self._arrays[name] = self._host[part].view(dtype).view(shape).numpy()
            self._tensors[name] = self._device[part].view(dtype).view(shape)

    def fill(self, inputs: Arrays, padding: Mapping[str, float]) -> None:
        """Copy the inputs into the buffers, and padding behind them."""
        for name, array in inputs.items():
            buffer, rows = self._arrays[name], len(array)
            buffer[:rows] = array
            buffer[rows:] = (array[-1] if rows else 0) if name == REPEATED else padding.get(name, 0)

    def capture(self, function: Function, pool: GraphPool | None) -> None:
        """Run the function on what is in the buffers, and make the CUDA graph of it."""
        if not self._on_gpu:
            function(self._tensors)
            self._replay = lambda: function(self._tensors)
            return
        self._device.copy_(self._host)
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            function(self._tensors)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = function(self._tensors)

        def replay() -> Sequence[Tensor]:
            graph.replay()
            return outputs

        self._replay = replay

    def run(self) -> list[np.ndarray]:
        """The results for what is in the buffers. This waits for the device, once."""
        if not self._on_gpu:
            return [output.numpy() for output in self._replay()]
        self._device.copy_(self._host, non_blocking=True)
        results = self._results.fetch(self._replay())
        torch.cuda.current_stream().synchronize()
        return [result.numpy() for result in results]
