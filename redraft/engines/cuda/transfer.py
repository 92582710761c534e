"""Copies between the host and torch's device through pinned memory, so that the host waits only where it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Enqueue a copy of an array to the device; on the CPU it is the array's own memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Pinned:
    """Pinned buffers by key, each as large as the largest tensor that it served; not pinned without a GPU."""

    def __init__(self, on_gpu: bool):
        self._on_gpu, self._memory = on_gpu, dict[int | str, Tensor]()

    def like(self, tensor: Tensor, key: int | str) -> Tensor:
        """An uninitialised buffer shaped like `tensor`; calls with the same `key` share it."""
        size = tensor.numel() * tensor.element_size()
        if key not in self._memory or len(self._memory[key]) < size:
            self._memory[key] = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)
        return self._memory[key][:size].view(tensor.dtype).view(tensor.shape)


class Results:
    """Fetches the results of calls to the host."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._pinned = Pinned(self._on_gpu)

    def fetch(self, outputs: Sequence[Tensor], meanwhile: Callable[[], None] | None = None) -> list[np.ndarray]:
        """Wait for the device, once, and give the outputs: views that stay valid until the next fetch; on the CPU they
        are the outputs' own memory. On a GPU `meanwhile` is called before the wait."""
        if not self._on_gpu:
            return [output.numpy() for output in outputs]
        result = [
            self._pinned.like(output, number).copy_(output, non_blocking=True) for number, output in enumerate(outputs)
        ]
        if meanwhile is not None:
            meanwhile()
        torch.cuda.current_stream().synchronize()
        return [output.numpy() for output in result]
