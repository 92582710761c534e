"""Calls of fixed shapes: inputs staged in one copy, on a GPU (not run) a CUDA graph. The host waits for none of
it."""

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
Inputs = Mapping[str, np.ndarray | Tensor]
"""Arrays int32 or float32, or tensors that are on the device already."""
Function = Callable[[dict[str, Tensor]], Sequence[Tensor]]
"""Tensors by name to results; those are read before the next call."""


def padded_size(count: int, most: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds `count`, and at most `most`."""
    size = 1 << (count - 1).bit_length()
    return min(3 * size // 4 if size > 3 and 3 * size // 4 >= count else size, most)


class FixedCalls:
    """A function at every shape that is asked for: made when first needed, then kept.

    A call only enqueues: before the next one the host must have waited for the device. `padding` is what inputs are
    padded with, 0 where it names none. A new shape's first call has padding alone and the inputs of `idle`, so that it
    changes nothing that another would read. Where memory does not suffice for it, the shapes that are kept are given
    up, to be made again when they are needed: not without `tries_again`, as of ranks, whose calls are each other's.
    """

    def __init__(
        self,
        function: Function,
        device: torch.device,
        graph_pool: GraphPool | None = None,
        padding: Mapping[str, float] | None = None,
        idle: Mapping[str, np.ndarray] | None = None,
        tries_again: bool = True,
    ):
        self._function, self._device, self._pool = function, device, graph_pool
        self._padding, self._idle, self._tries_again = dict(padding or {}), dict(idle or {}), tries_again
        self._calls: dict[tuple[tuple[int, ...], ...], _FixedCall] = {}

    def __call__(self, inputs: Inputs, rows: Mapping[str, int]) -> Sequence[Tensor]:
        """The results on the device for inputs padded to the first dimensions in `rows`, where it names them; valid
        until the next call, of another function too where they share a graph pool."""
        shapes = {name: (rows.get(name, len(array)), *array.shape[1:]) for name, array in inputs.items()}
        key = tuple(shapes.values())
        if key not in self._calls:
            self._calls[key] = self._made_with_room(inputs, shapes)
        call = self._calls[key]
        call.fill(inputs, self._padding)
        return call.run()

    def __len__(self) -> int:
        return len(self._calls)

    def _made_with_room(self, inputs: Inputs, shapes: dict[str, tuple[int, ...]]) -> _FixedCall:
        """Raises torch.OutOfMemoryError where memory does not suffice for this shape alone."""
        try:
            return self._made(inputs, shapes)
        except torch.OutOfMemoryError:
            if not self._tries_again:
                raise
            self._calls.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return self._made(inputs, shapes)

    def _made(self, inputs: Inputs, shapes: dict[str, tuple[int, ...]]) -> _FixedCall:
        call = _FixedCall(shapes, inputs, self._device)
        call.fill({name: self._idle.get(name, array[:0]) for name, array in inputs.items()}, self._padding)
        call.capture(self._function, self._pool)
        return call


class _FixedCall:
    """Buffers of one shape: of arrays back to back, pinned on the host and on the device, which on the CPU are one; of
    tensors apart."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], inputs: Inputs, device: torch.device):
        self._on_gpu = device.type == "cuda"
        sizes = {name: int(np.prod(shapes[name])) for name, x in inputs.items() if isinstance(x, np.ndarray)}
        starts = np.cumsum([0, *(-(-size // ALIGNED) * ALIGNED for size in sizes.values())]).tolist()
        self._host = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=self._on_gpu)
        self._device = torch.zeros(starts[-1], dtype=torch.int32, device=device) if self._on_gpu else self._host
        places = {name: slice(start, start + sizes[name]) for name, start in zip(sizes, starts, strict=False)}
        self._arrays: dict[str, np.ndarray] = {}
        self._tensors: dict[str, Tensor] = {}
        for name, given in inputs.items():
            if isinstance(given, np.ndarray):
                dtype = torch.from_numpy(given[:0]).dtype
                staged, buffer = (x[places[name]].view(dtype).view(shapes[name]) for x in (self._host, self._device))
                self._arrays[name], self._tensors[name] = staged.numpy(), buffer
            else:
                self._tensors[name] = torch.zeros(shapes[name], dtype=given.dtype, device=device)

    def fill(self, inputs: Inputs, padding: Mapping[str, float]) -> None:
        """Copy the inputs into the buffers, and padding behind them."""
        for name, array in inputs.items():
            if isinstance(array, np.ndarray):
                buffer, rows = self._arrays[name], len(array)
                buffer[:rows] = array
                buffer[rows:] = (array[-1] if rows else 0) if name == REPEATED else padding.get(name, 0)
        if self._on_gpu:
            self._device.copy_(self._host, non_blocking=True)
        for name, tensor in inputs.items():
            if not isinstance(tensor, np.ndarray):
                self._tensors[name][: len(tensor)].copy_(tensor)
                self._tensors[name][len(tensor) :].fill_(padding.get(name, 0))

    def capture(self, function: Function, pool: GraphPool | None) -> None:
        """Run the function on what is in the buffers, and make the CUDA graph of it."""
        if not self._on_gpu:
            function(self._tensors)
            self.run = lambda: function(self._tensors)
            return
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            function(self._tensors)
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = function(self._tensors)

        def replay() -> Sequence[Tensor]:
            graph.replay()
            return outputs

        self.run = replay
