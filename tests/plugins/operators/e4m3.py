"""Compares rows in E4M3 bit for bit; codes of NaN may differ in their sign."""

from __future__ import annotations

import torch

from redraft.plugins.operators.fp8_linear.reference import quantized


def check_codes(found: tuple[torch.Tensor, ...], x: torch.Tensor) -> None:
    """Codes and scales are those of the reference for rows x."""
    (codes, scale), (expected, expected_scale) = found, quantized(x)
    assert torch.equal(scale.view(torch.int32), expected_scale.view(torch.int32))
    usual = ~expected.float().isnan()
    assert torch.equal(codes.float().isnan(), ~usual)
    assert torch.equal(codes.view(torch.uint8)[usual], expected.view(torch.uint8)[usual])
