"""The CUDA kernel against torch."""

from __future__ import annotations

import pytest
import torch

from redraft.plugins.operators.fp8_linear.reference import quantized
from redraft.plugins.operators.silu_product import cuda
from redraft.plugins.operators.silu_product.reference import silu_product
from redraft.plugins.operators.silu_product.torch_op import silu_product as operator
from redraft.plugins.operators.silu_product.torch_op import silu_product_quantized as quantized_operator
from tests.plugins.operators.e4m3 import check_codes


def case(rows: int, features: int) -> torch.Tensor:
    torch.manual_seed(features)
    return (torch.randn(rows, 2 * features) * 10 ** torch.linspace(-3, 2, rows)[:, None]).bfloat16()


@pytest.mark.parametrize("features", [8, 200, 1024, 1032, 2056])
def test_the_kernel_agrees(features, run_kernel, monkeypatch):
    """To the last bit but for some of silu's roundings."""
    monkeypatch.setattr(cuda, "run", run_kernel)
    gate_up = case(5, features)
    ours, theirs = cuda.silu_product(gate_up), silu_product(gate_up)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-7, atol=1e-30)
    assert (ours == theirs).float().mean() > 0.98


def test_large_and_small_gates_are_finite():
    gate = torch.tensor([-3e38, -200.0, -0.0, 0.0, 1e-30, 200.0, 3e38, -88.0]).bfloat16()
    gate_up = torch.cat([gate, torch.ones(8).bfloat16()])[None]
    assert torch.equal(cuda.silu_product(gate_up), silu_product(gate_up))


def test_the_operator_is_torchs_on_the_cpu_in_any_shape():
    gate_up = case(3, 40)
    assert torch.equal(operator(gate_up[:, None]), silu_product(gate_up)[:, None])
    assert torch.equal(cuda.silu_product(gate_up[:, None]), cuda.silu_product(gate_up)[:, None])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="expected a last size that is a multiple of 16"):
        cuda.silu_product(case(2, 12))


@pytest.mark.parametrize("features", [16, 208, 2064, 14336])
def test_the_quantized_product_has_the_bits_of_the_products_codes(features, run_kernel, monkeypatch):
    """Of the kernel's own product."""
    monkeypatch.setattr(cuda, "run", run_kernel)
    gate_up = case(4, features)
    gate_up[1] = 0
    check_codes(cuda.silu_product_quantized(gate_up), cuda.silu_product(gate_up))
    for ours, theirs in zip(quantized_operator(gate_up), quantized(silu_product(gate_up)), strict=True):
        assert torch.equal(ours.float(), theirs.float())
    assert [r.shape for r in cuda.silu_product_quantized(gate_up[:, None])] == [(4, 1, features), (4, 1)]
    assert [r.shape for r in cuda.silu_product_quantized(gate_up[:0])] == [(0, features), (0,)]
    with pytest.raises(ValueError, match="expected a last size that is a multiple of 32"):
        cuda.silu_product_quantized(case(2, 8))
