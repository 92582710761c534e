import numpy as np
import pytest

from benchmarks.speed import kernel_calls
from redraft.plugins import kernels
from redraft.plugins.operators.embedding.reference import embedding
from redraft.plugins.operators.linear.blocks import BlockWeight
from redraft.plugins.operators.linear.pack import GATED, PRECISIONS, bf16_bits, from_bf16_bits, pack
from redraft.plugins.operators.linear.reference import block_product, linear
from redraft.plugins.operators.linear_topk.reference import linear_topk
from redraft.plugins.operators.norm.reference import norm as reference_norm
from tests.plugins.conftest import ISAS

FLOATS = ("fp32", "bf16")
SIZES = [(1, 576, 960), (3, 111, 111), (129, 576, 33), (2, 3, 5)]


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("precision", FLOATS)
@pytest.mark.parametrize("activation", ["none", "swiglu", "geglu", "silu", "silu_last", "relu"])
@pytest.mark.parametrize(("rows", "k", "n"), SIZES)
def test_linear_equals_reference(isa, rng, precision, activation, rows, k, n):
    weight_rows = 2 * n if activation in GATED else n
    weight = normal(rng, weight_rows, k, scale=k**-0.5)
    # Already of bf16's precision: the norm in front could round one way here and the other there.
    x = from_bf16_bits(bf16_bits(normal(rng, rows, k)))
    options = {"bias": normal(rng, weight_rows), "residual": normal(rng, rows, n), "activation": activation}
    out = kernel_calls.linear(x, pack(weight, precision, activation), n, **options)
    np.testing.assert_allclose(out, linear(x, weight, precision, **options), atol=2e-5, rtol=1e-5)


def test_norm_in_front_and_chosen_rows(isa, rng):
    x, weight, norm = normal(rng, 9, 576, scale=5), normal(rng, 100, 576, scale=0.04), normal(rng, 576)
    rows = np.array([8, 0, 0, 3], np.int32)
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 1e-3)):
        out = kernel_calls.linear(x, pack(weight, precision), 100, norm=norm, norm_eps=1e-6, rows=rows)
        expected = linear(x, weight, precision, norm=norm, norm_eps=1e-6, rows=rows)
        np.testing.assert_allclose(out, expected, atol=tolerance)


@pytest.mark.parametrize("size", [111, 576])
@pytest.mark.parametrize("biased", [False, True])
def test_norms_equal_references(isa, rng, size, biased):
    """RMS norm, and with a bias LayerNorm, of rows whose mean is not zero: by itself and in front of a product."""
    x, weight, bias = normal(rng, 3, size, scale=2) + 5, normal(rng, size), normal(rng, size) if biased else None
    expected = reference_norm(x, weight, 1e-5, bias)
    np.testing.assert_allclose(kernel_calls.norm(x, weight, 1e-5, bias), expected, atol=1e-5)
    np.testing.assert_allclose(kernel_calls.norm(x, weight, 1e-5, bias, x), x + expected, atol=1e-5)
    matrix = normal(rng, 70, size, scale=0.04)
    options = {"norm": weight, "norm_bias": bias, "norm_eps": 1e-5, "rows": np.array([2, 0, 2], np.int32)}
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 2e-3)):
        out = kernel_calls.linear(x, pack(matrix, precision), 70, **options)
        np.testing.assert_allclose(out, linear(x, matrix, precision, **options), atol=tolerance)
    rows = kernel_calls.norm(x, weight, 1e-5, bias)[options["rows"]]  # the bits of which are rounded to 8 bits
    for precision in ("int8", "int4"):
        out = kernel_calls.linear(x, pack(matrix, precision), 70, **options)
        np.testing.assert_array_equal(out, block_product(rows, BlockWeight.quantized(matrix, precision)))
    values, ids = kernel_calls.linear_topk(x, pack(matrix, "fp32"), 70, 5, **options)
    expected_values, expected_ids = linear_topk(expected[options["rows"]], matrix, 5)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(values, expected_values, atol=1e-5)


def test_chosen_rows_of_a_residual(isa, rng):
    x, weight, residual = normal(rng, 3, 111), normal(rng, 70, 111, scale=0.1), normal(rng, 2, 70)
    options = {"residual": residual, "residual_rows": np.array([1, 0, 1], np.int32), "activation": "silu_last"}
    out = kernel_calls.linear(x, pack(weight, "fp32"), 70, **options)
    np.testing.assert_allclose(out, linear(x, weight, **options), atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_rows(isa, rng, precision):
    x, packed, none = normal(rng, 3, 111), pack(normal(rng, 70, 111), precision), np.empty(0, np.int32)
    for some in ({"x": x[:0]}, {"x": x, "rows": none}):
        assert kernel_calls.linear(**some, weight=packed, out_features=70).shape == (0, 70)
        values, ids = kernel_calls.linear_topk(**some, weight=packed, out_features=70, k=5)
        assert values.shape == ids.shape == (0, 5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_does_not_depend_on_the_others(isa, rng, precision):
    x, norm = normal(rng, 70, 111), normal(rng, 111)
    weight = normal(rng, 2 * 90, 111)
    for activation, n in (("none", 180), ("swiglu", 90), ("silu", 180), ("silu_last", 180), ("relu", 180)):
        packed, residual = pack(weight, precision, activation), normal(rng, 70, n)
        options = {"norm": norm, "norm_bias": norm if activation == "relu" else None, "activation": activation}
        all_rows = kernel_calls.linear(x, packed, n, residual=residual, **options)
        for first, count in ((0, 1), (13, 1), (1, 2), (5, 8), (3, 16), (20, 33)):
            rows = slice(first, first + count)
            part = kernel_calls.linear(x[rows], packed, n, residual=residual[rows], **options)
            np.testing.assert_array_equal(part, all_rows[rows])


@pytest.mark.parametrize("precision", FLOATS)
def test_a_row_of_tiny_values_does_not_depend_on_the_others(isa, rng, precision):
    """Products around float32's smallest normal number, 1.2e-38: what flushes denormals must do so for any rows."""
    x, weight = normal(rng, 20, 96, scale=1e-19), normal(rng, 40, 96, scale=1e-19)
    weight[:, ::7] *= 1e-20
    packed = pack(weight, precision)
    all_rows = kernel_calls.linear(x, packed, 40)
    for count in range(1, 20):
        np.testing.assert_array_equal(kernel_calls.linear(x[:count], packed, 40), all_rows[:count])


@pytest.mark.parametrize("precision", FLOATS)
def test_threads_do_not_matter(isa, rng, precision):
    x, packed = normal(rng, 5, 576), pack(normal(rng, 3000, 576), precision)
    outs = []
    try:
        for count in (1, 2, 5):
            kernels.set_threads(count)
            outs.append((kernel_calls.linear(x, packed, 3000), *kernel_calls.linear_topk(x, packed, 3000, 12)))
    finally:
        kernels.set_threads(2)
    for other in outs[1:]:
        for a, b in zip(outs[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_instruction_sets_agree(rng):
    x, weight = normal(rng, 6, 333), normal(rng, 200, 333, scale=0.05)
    norms = {"norm": normal(rng, 333), "norm_bias": normal(rng, 333)}
    outs: dict[str, dict[str, np.ndarray]] = {}
    for name in ISAS:
        try:
            kernels.select_isa(name)
        except ValueError:
            continue
        outs[name] = {d: kernel_calls.linear(x, pack(weight, d), 200, **norms) for d in PRECISIONS}
    kernels.select_isa(None)
    for other in outs.values():
        for precision in ("fp32", "int8", "int4"):
            np.testing.assert_array_equal(other[precision], outs["avx2"][precision])
        np.testing.assert_allclose(other["bf16"], outs["avx2"]["bf16"], atol=1e-5)


@pytest.mark.parametrize("precision", FLOATS)
@pytest.mark.parametrize(("rows", "k", "n", "top"), [(1, 576, 8192, 16), (3, 111, 111, 111), (37, 64, 1000, 5)])
def test_topk_equals_reference(isa, rng, precision, rows, k, n, top):
    x, weight = from_bf16_bits(bf16_bits(normal(rng, rows, k))), normal(rng, n, k, scale=k**-0.5)
    ids, bias = rng.permutation(n).astype(np.int32), normal(rng, n)
    values, indices = kernel_calls.linear_topk(x, pack(weight, precision), n, top, ids=ids, bias=bias)
    expected_values, expected = linear_topk(x, weight, top, precision, ids=ids, bias=bias)
    np.testing.assert_allclose(values, expected_values, atol=2e-5)
    assert (indices != expected).mean() < 0.01
    single = kernel_calls.linear_topk(x[-1:], pack(weight, precision), n, top, ids=ids, bias=bias)
    np.testing.assert_array_equal(single[0][0], values[-1])
    np.testing.assert_array_equal(single[1][0], indices[-1])


def test_topk_ties_go_to_the_lower_index(isa):
    weight = np.ones((700, 32), np.float32)
    values, indices = kernel_calls.linear_topk(np.ones((2, 32), np.float32), pack(weight, "bf16"), 700, 64)
    np.testing.assert_array_equal(indices, np.tile(np.arange(64), (2, 1)))
    np.testing.assert_allclose(values, -np.log(700), atol=1e-5)


@pytest.mark.parametrize("top", [1, 100, 1300])
@pytest.mark.parametrize("steps", [1, 40])
def test_topk_of_few_different_logits(isa, rng, top, steps):
    """Any number of the best, of logits many of which are equal, above and below zero."""
    weight = (rng.integers(-steps, steps + 1, (1300, 1)) / 8).astype(np.float32)
    values, indices = kernel_calls.linear_topk(np.ones((1, 1), np.float32), pack(weight, "fp32"), 1300, top)
    expected_values, expected = linear_topk(np.ones((1, 1)), weight, top)
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_allclose(values, expected_values, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_embedding_reads_packed_weights(isa, rng, precision):
    weight, ids = normal(rng, 77, 111), np.array([76, 0, 31, 32, 5, 5], np.int32)
    out = kernel_calls.embedding(ids, pack(weight, precision), 111, 77)
    np.testing.assert_allclose(out, embedding(ids, weight, precision), rtol=1e-6)
    options = {"clamped": True, "factor": 1.7, "residual": normal(rng, 3, 111)}
    beyond = np.array([79, 76, 77], np.int32)
    out = kernel_calls.embedding(beyond, pack(weight, precision), 111, 77, **options)
    np.testing.assert_allclose(out, embedding(beyond, weight, precision, **options), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="token id 77: expected 0 to 76"):
        kernel_calls.embedding(np.array([77], np.int32), pack(weight, precision), 111, 77)
    with pytest.raises(ValueError, match="token id -1"):
        kernel_calls.embedding(np.array([-1], np.int32), pack(weight, precision), 111, 77, clamped=True)


def test_bad_arguments_are_named(rng):
    with pytest.raises(ValueError, match="fp16"):
        pack(normal(rng, 4, 4), "fp16")
    with pytest.raises(ValueError, match="k 5: expected 1 to out_features"):
        kernel_calls.linear_topk(normal(rng, 1, 4), pack(normal(rng, 4, 4), "fp32"), 4, 5)
    with pytest.raises(ValueError, match="row id 3: expected 0 to 0"):
        kernel_calls.linear(normal(rng, 1, 4), pack(normal(rng, 4, 4), "fp32"), 4, rows=np.array([3], np.int32))
    square, pair = pack(normal(rng, 4, 4), "fp32"), normal(rng, 2, 4)
    with pytest.raises(ValueError, match="residual rows 1: expected a row each"):
        kernel_calls.linear(pair, square, 4, residual=pair[:1])
    with pytest.raises(ValueError, match="residual row id 2: expected 0 to 1"):
        kernel_calls.linear(pair, square, 4, residual=pair, residual_rows=np.array([0, 2], np.int32))
    with pytest.raises(ValueError, match="REDRAFT_ISA=sse"):
        kernels.select_isa("sse")
    with pytest.raises(ValueError, match="thread count 0"):
        kernels.set_threads(0)


def test_weights_of_a_type_for_token_info_only_are_refused(rng, monkeypatch):
    monkeypatch.setitem(kernel_calls.DTYPES, "fp32", kernel_calls.DTYPES["int8"])
    for wrong in (
        lambda: kernel_calls.linear(normal(rng, 1, 4), pack(normal(rng, 4, 4), "fp32"), 4),
        lambda: kernel_calls.linear_topk(normal(rng, 1, 4), pack(normal(rng, 4, 4), "fp32"), 4, 2),
        lambda: kernel_calls.embedding(np.zeros(1, np.int32), pack(normal(rng, 4, 4), "fp32"), 4, 4),
    ):
        with pytest.raises(ValueError, match="dtype 2: expected fp32, bf16 or blocks"):
            wrong()
