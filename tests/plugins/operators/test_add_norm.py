"""The CUDA kernel against torch."""

from __future__ import annotations

import pytest
import torch

from redraft.plugins.operators.add_norm import cuda
from redraft.plugins.operators.add_norm.reference import add_norm
from redraft.plugins.operators.add_norm.torch_op import add_norm as operator
from redraft.plugins.operators.add_norm.torch_op import add_norm_quantized as quantized_operator
from redraft.plugins.operators.fp8_linear.reference import quantized
from tests.plugins.operators.e4m3 import check_codes

EPS = 1e-5


def case(rows: int, features: int) -> list[torch.Tensor]:
    torch.manual_seed(features)
    scale = 10 ** torch.linspace(-2, 3, rows)[:, None]
    return [x.bfloat16() for x in (torch.randn(rows, features) * scale, torch.randn(rows, features) * scale)] + [
        torch.randn(features).bfloat16()
    ]


@pytest.mark.parametrize("features", [8, 56, 576, 1032, 4096])
def test_the_kernel_agrees(features, run_kernel, monkeypatch):
    monkeypatch.setattr(cuda, "run", run_kernel)
    x, part, weight = case(5, features)
    total, normed = cuda.add_norm(x, part, weight, EPS)
    expected, of_it = add_norm(x, part, weight, EPS)
    assert torch.equal(total, expected)
    torch.testing.assert_close(normed.float(), of_it.float(), rtol=2**-7, atol=1e-5)
    exact = torch.nn.functional.rms_norm(total.double(), weight.shape, weight.double(), EPS)
    torch.testing.assert_close(normed.double(), exact, rtol=2**-8 * 1.01, atol=1e-6)


def test_a_row_has_the_bits_that_it_has_alone():
    x, part, weight = case(3, 136)
    together = cuda.add_norm(x, part, weight, EPS)
    for row in range(3):
        alone = cuda.add_norm(x[row : row + 1], part[row : row + 1], weight, EPS)
        assert all(torch.equal(one[0], whole[row]) for one, whole in zip(alone, together, strict=True))


def test_rows_of_zeros_stay_zeros_and_epsilon_counts():
    zeros = torch.zeros(1, 16).bfloat16()
    assert not any(result.any() for result in cuda.add_norm(zeros, zeros, torch.ones(16).bfloat16(), EPS))
    small = torch.full((1, 16), 2.0**-9).bfloat16()
    _, normed = cuda.add_norm(small, zeros, torch.ones(16).bfloat16(), 1.0)
    assert torch.equal(normed, small), "divided by about 1"


def test_the_operator_is_torchs_on_the_cpu():
    x, part, weight = case(3, 96)
    for ours, theirs in zip(operator(x, part, weight, EPS), add_norm(x, part, weight, EPS), strict=True):
        assert torch.equal(ours, theirs)
    assert [r.shape for r in cuda.add_norm(x[:, None], part[:, None], weight, EPS)] == [(3, 1, 96)] * 2


def test_what_does_not_fit_is_refused():
    x, part, weight = case(2, 16)
    with pytest.raises(ValueError, match="expected a last size that is a multiple of 8"):
        cuda.add_norm(x[:, :12], part[:, :12], weight[:12], EPS)
    with pytest.raises(ValueError, match="part has features 8: expected 16"):
        cuda.run(cuda.ADD_NORM, [x, part[:, :8].contiguous(), weight], {"eps": 1})


@pytest.mark.parametrize("features", [16, 1040, 4096])
def test_the_quantized_norm_has_the_bits_of_the_norms_codes(features, run_kernel, monkeypatch):
    """Of the kernel's own norm, in rows of zeros and NaN too."""
    monkeypatch.setattr(cuda, "run", run_kernel)
    x, part, weight = case(5, features)
    x[1] = part[1] = 0
    x[2, 7] = float("nan")
    total, normed = cuda.add_norm(x, part, weight, EPS)
    same, codes, scale = cuda.add_norm_quantized(x, part, weight, EPS)
    assert torch.equal(same.nan_to_num(), total.nan_to_num())
    check_codes((codes, scale), normed)
    for ours, theirs in zip(
        quantized_operator(x, part, weight, EPS)[1:], quantized(operator(x, part, weight, EPS)[1]), strict=True
    ):
        assert torch.equal(ours.float().nan_to_num(), theirs.float().nan_to_num())
    shapes = [r.shape for r in cuda.add_norm_quantized(x[:, None], part[:, None], weight, EPS)]
    assert shapes == [(5, 1, features), (5, 1, features), (5, 1)]
    with pytest.raises(ValueError, match="expected a last size that is a multiple of 16"):
        cuda.add_norm_quantized(x[:, :8], part[:, :8], weight[:8], EPS)
