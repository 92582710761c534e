"""The operator against its definition, and the CUDA kernel's codes against the reference's, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from redraft.plugins.cuda import launch
from redraft.plugins.operators.fp8_linear import cuda
from redraft.plugins.operators.fp8_linear.reference import E4M3, fp8_linear, quantize_rows
from redraft.plugins.operators.fp8_linear.torch_op import fp8_linear as operator
from tests.plugins.operators.e4m3 import check_codes

ROWS, FEATURES, OUT = 7, 48, 80


def case(rows: int = ROWS, features: int = FEATURES, out: int = OUT) -> tuple[torch.Tensor, ...]:
    """Rows of very different size, a matrix in E4M3 with a scale per row, and a bias."""
    torch.manual_seed(0)
    x = (torch.randn(rows, features) * 10 ** torch.linspace(-3, 3, rows)[:, None]).bfloat16()
    weight, scale = quantize_rows(torch.randn(out, features))
    return x, weight, scale, torch.randn(out).bfloat16()


def test_codes_are_the_nearest_of_a_rows_own_scale():
    x, *_ = case()
    codes, scale = quantize_rows(x)
    values = x.float().numpy()
    np.testing.assert_array_equal(scale, np.abs(values).max(1) / np.float32(448))
    expected = (values / scale.numpy()[:, None]).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(codes.view(torch.uint8), expected.view(np.uint8))
    assert (codes.float().abs().amax(1) == 448).all()


def test_rows_of_zeros_stay_zeros_and_nan_stays():
    x = torch.zeros(3, FEATURES).bfloat16()
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    _, weight, scale, bias = case()
    out = fp8_linear(x, weight, scale, bias)
    assert torch.equal(out[0], bias)
    assert out[1:].isnan().all()


@pytest.mark.parametrize("with_bias", [False, True])
def test_it_is_the_product_of_what_the_codes_stand_for(with_bias):
    x, weight, scale, bias = case(features=3 * FEATURES)
    codes, row_scale = quantize_rows(x)
    rows, matrix = codes.double() * row_scale.double()[:, None], weight.double() * scale.double()[:, None]
    expected = rows @ matrix.T + (bias.double() if with_bias else 0)
    out = fp8_linear(x, weight, scale, bias if with_bias else None)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=0)


def test_a_row_has_the_bits_that_it_has_alone():
    """Also with its features in another order: sums are exact."""
    x, weight, scale, bias = case(rows=13, features=592, out=1040)
    together = operator(x, weight, scale, bias)
    order = torch.randperm(x.shape[1])
    for row in range(len(x)):
        assert torch.equal(operator(x[row : row + 1], weight, scale, bias)[0], together[row])
    assert torch.equal(operator(x[:, order], weight[:, order].contiguous(), scale, bias), together)
    assert torch.equal(operator(x[None, :, None], weight, scale, bias)[0, :, 0], together)


def test_the_kernels_codes_are_the_references(run_kernel):
    """Of every bf16 number: in rows by size, so that subnormal codes come, and shuffled; with rows of zeros and NaN."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    by_size = every[every.float().abs().argsort(stable=True)][: len(every) // 4096 * 4096].reshape(-1, 4096)
    odd = torch.randn(5, 2064).bfloat16()
    odd[1] = 0
    odd[2, 2063], odd[3, 9] = float("nan"), float("-inf")
    shuffled = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]
    for x in (by_size, odd, shuffled[:65024].reshape(-1, 16)):
        check_codes(tuple(run_kernel(cuda.QUANTIZE_ROWS, [x.contiguous()], {})), x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("rows", [1, 7, 16, 130])
def test_the_gpus_product_is_the_references(rows):
    """Its sums keep about 14 bits of the largest product."""
    given = case(rows, 1040, 592)
    x, weight, scale, _ = given
    sizes = x.abs().double() @ (weight.double().abs() * scale.double()[:, None]).T
    for arguments in (given, given[:3]):
        out, expected = operator(*(part.cuda() for part in arguments)).cpu(), fp8_linear(*arguments)
        assert ((out.double() - expected.double()).abs() <= 2**-8 * expected.double().abs() + 2**-10 * sizes).all()


def test_the_gpus_product_takes_what_it_is_given(monkeypatch):
    """By torch's own checks of sizes, strides and scales, on tensors of a GPU that there is not."""

    def declared(kernel, inputs, attributes):
        sizes = kernel.sizes([tensor.shape for tensor in inputs], attributes)
        assert all(tensor.is_contiguous() for tensor in inputs)
        dtypes = [launch.TORCH_DTYPES[output.dtype] for output in kernel.outputs]
        return [
            torch.empty([sizes[n] for n in output.shape], dtype=dtype, device="cuda")
            for output, dtype in zip(kernel.outputs, dtypes, strict=True)
        ]

    monkeypatch.setattr(cuda, "run", declared)
    with FakeTensorMode():
        _, weight, scale, bias = (torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in case())
        for shape in ((ROWS,), (1,), (ROWS, 1), (0,)):
            x = torch.empty(*shape, FEATURES, dtype=torch.bfloat16, device="cuda")
            out = cuda.fp8_linear(x, weight, scale, bias)
            assert (out.shape, out.dtype) == ((*shape, OUT), torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, FEATURES)}, "x torch.float32, .*: expected torch.bfloat16"),
        ({"weight": torch.zeros(OUT, FEATURES)}, "weight torch.float32"),
        (
            {"weight": torch.zeros(OUT + 1, FEATURES).to(E4M3)},
            r"weight \(81, 48\): expected two sizes that are multiples",
        ),
        ({"scale": torch.ones(OUT - 16)}, r"scale \(64,\) for a weight \(80, 48\)"),
        ({"x": torch.zeros(3, FEATURES + 16).bfloat16()}, r"x \(3, 64\) and"),
        ({"bias": torch.zeros(1).bfloat16()}, r"bias torch.bfloat16 \(1,\): expected"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = dict(zip(("x", "weight", "scale", "bias"), case(), strict=True)) | change
    for function in (fp8_linear, cuda.fp8_linear):
        with pytest.raises(ValueError, match=message):
            function(**given)
