"""Copies between the host and torch's device: through pinned memory, so that the host waits only when it wants to.
On a GPU: not run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Enqueue a copy of an array to the device; on the CPU it is the array's own memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Results:
    """Pinned memory for what calls of all shapes give in turn, of the largest one's size for each place."""

    def __init__(self, device: torch.device):
        self._on_gpu, self._pinned = device.type == "cuda", dict[int, Tensor]()

    def fetch(self, outputs: Sequence[Tensor]) -> list[np.ndarray]:
        """Wait for the device, once, and give the outputs: views that stay valid until the next fetch; on the CPU they
        are the outputs' own memory."""
        if not self._on_gpu:
            return [output.numpy() for output in outputs]
        found = [self._place(number, output).copy_(output, non_blocking=True) for number, output in enumerate(outputs)]
        torch.cuda.current_stream().synchronize()
        return [output.numpy() for output in found]

    def _place(self, number: int, output: Tensor) -> Tensor:
        size = output.numel() * output.element_size()
        if number not in self._pinned or len(self._pinned[number]) < size:
            self._pinned[number] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._pinned[number][:size].view(output.dtype).view(output.shape)
