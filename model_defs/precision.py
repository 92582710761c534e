"""In what precision training and teacher data compute: bfloat16 where the device multiplies it."""

from __future__ import annotations

import torch


def working_dtype(device: torch.device) -> torch.dtype:
    """bfloat16, or float32 on CPUs without its instructions, where imitating them takes three times as long."""
    if device.type == "cpu" and not torch.cpu.get_capabilities().get("avx512_bf16", False):
        return torch.float32
    return torch.bfloat16


def working_precision(device: torch.device) -> torch.autocast:
    """A context in which float32 modules compute in the working dtype."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=working_dtype(device) is torch.bfloat16)
