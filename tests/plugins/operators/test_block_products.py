import numpy as np
import pytest

from benchmarks.speed import kernel_calls
from redraft.plugins import kernels
from redraft.plugins.operators.linear.blocks import FORMS, BlockWeight, block_form
from redraft.plugins.operators.linear.pack import GATED, PackedWeight, cut, dtype_of, half_panel_rows, pack_blocks
from redraft.plugins.operators.linear.reference import block_product, gelu, silu
from redraft.plugins.operators.linear_topk.reference import linear_topk

NAMES = [*FORMS, "i4g32", "i4g96", "i8g64", "i8g1024"]


def random_weight(rng: np.random.Generator, name: str, rows: int, features: int) -> BlockWeight:
    """Codes, integer scales and zeros of any size, the largest ones too; a few rows of zeros."""
    form = block_form(name)
    parts = {}
    for part in form.parts:
        shape = rows, -(-features // part.features)
        if part.dtype.startswith("float"):
            parts[part.name] = (rng.standard_normal(shape) * features**-0.5).astype(part.dtype)
            parts[part.name][rows // 2] = 0
        else:
            most = 64 if part.dtype == "uint8" and part.name != "zero" else np.iinfo(part.dtype).max + 1
            parts[part.name] = rng.integers(np.iinfo(part.dtype).min, most, shape, part.dtype)
    codes = rng.integers(0, 1 << form.bits, (rows, features), np.uint8)
    codes[0] = (1 << form.bits) - 1
    return BlockWeight(form, codes, parts)


def random_rows(rng: np.random.Generator, rows: int, features: int) -> np.ndarray:
    """The first row's codes are all the largest, with the largest weight row the products that leave 16 bits first."""
    x = rng.standard_normal((rows, features)).astype(np.float32)
    x[0] = 2.5
    x[-1, : features // 2] *= 1e-3
    x[-1, -7:] = 0
    return x


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "k", "n"), [(3, 111, 111), (1, 576, 48), (21, 288, 33), (2, 5, 3)])
def test_products_have_the_bits_of_the_stated_order(isa, rng, name, rows, k, n):
    weight, x = random_weight(rng, name, n, k), random_rows(rng, rows, k)
    packed = pack_blocks([weight])
    out = kernel_calls.linear(x, packed, n)
    np.testing.assert_array_equal(out, block_product(x, weight))
    exact = x.astype(np.float64) @ weight.dequantized().T.astype(np.float64)
    assert np.abs(out - exact).max() < 0.02 * np.abs(exact).max() + 1e-6


@pytest.mark.parametrize("activation", ["none", "swiglu", "geglu", "silu", "silu_last", "relu"])
@pytest.mark.parametrize("n", [33, 111])
def test_what_is_around_a_product(isa, rng, activation, n):
    rows, k = 5, 96
    weight = random_weight(rng, "q4_1", 2 * n if activation in GATED else n, k)
    x, bias, residual = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((rows, k), weight.shape[:1], (rows, n))
    )
    packed = pack_blocks([weight], activation)
    assert packed.dtype == (f"q4_1:{n},q4_1:{n}" if activation in GATED else f"q4_1:{n}")
    options = {"bias": bias, "residual": residual, "activation": activation}
    out = kernel_calls.linear(x, packed, n, **options)
    y = block_product(x, weight).astype(np.float64) + bias
    if activation in GATED:
        gate, up = np.split(y, 2, axis=1)
        y = (silu(gate) if activation == "swiglu" else gelu(gate)) * up
    y = {"silu": silu, "relu": lambda v: np.maximum(v, 0)}.get(activation, lambda v: v)(y) + residual
    np.testing.assert_allclose(out, silu(y) if activation == "silu_last" else y, rtol=1e-5, atol=1e-5)


def test_segments_of_several_forms(isa, rng):
    k = 512
    weights = [random_weight(rng, name, n, k) for name, n in (("q4_k", 48), ("q6_k", 16), ("i8g96", 32), ("q5_0", 15))]
    packed, x = pack_blocks(weights), random_rows(rng, 3, k)
    assert packed.dtype == "q4_k:48,q6_k:16,i8g96:32,q5_0:15"
    expected = np.concatenate([block_product(x, weight) for weight in weights], axis=1)
    np.testing.assert_array_equal(kernel_calls.linear(x, packed, 111), expected)
    values, ids = kernel_calls.linear_topk(x, packed, 111, 9)
    expected_values, expected_ids = linear_topk(expected, np.eye(111), 9)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(values, expected_values, atol=1e-5)
    tokens = np.arange(111, dtype=np.int32)
    table = np.concatenate([weight.dequantized() for weight in weights])
    np.testing.assert_array_equal(kernel_calls.embedding(tokens, packed, k, 111), table)
    gated = pack_blocks([random_weight(rng, "q4_0", 33, k), random_weight(rng, "q8_0", 33, k)], "swiglu")
    assert gated.dtype == "q4_0:33,q8_0:33"


@pytest.mark.parametrize("name", NAMES)
def test_a_table_of_blocks(isa, rng, name):
    weight = random_weight(rng, name, 77, 111)
    packed, tokens = pack_blocks([weight]), np.array([76, 0, 31, 16, 5, 5], np.int32)
    out = kernel_calls.embedding(tokens, packed, 111, 77)
    np.testing.assert_array_equal(out, weight.dequantized()[tokens])


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_the_others(isa, rng, name):
    x, norm = rng.standard_normal((40, 111)).astype(np.float32), rng.standard_normal(111).astype(np.float32)
    for activation, n in (("none", 111), ("swiglu", 55)):
        packed = pack_blocks([random_weight(rng, name, 2 * n if activation in GATED else n, 111)], activation)
        options = {"norm": norm, "activation": activation}
        everything = kernel_calls.linear(x, packed, n, **options)
        for first, count in ((0, 1), (13, 1), (1, 2), (7, 3), (4, 4), (5, 8), (3, 16), (2, 38)):
            some = slice(first, first + count)
            np.testing.assert_array_equal(kernel_calls.linear(x[some], packed, n, **options), everything[some])


@pytest.mark.parametrize("name", NAMES)
def test_a_row_with_a_nan_gives_nothing_else(isa, rng, name):
    x = rng.standard_normal((3, 111)).astype(np.float32)
    x[1, 70] = np.nan
    packed = pack_blocks([random_weight(rng, name, 111, 111)])
    out = kernel_calls.linear(x, packed, 111)
    assert np.isnan(out).all(1).tolist() == [False, True, False]
    assert np.isfinite(out[[0, 2]]).all()


def test_threads_do_not_matter(isa, rng):
    x, packed = rng.standard_normal((5, 576)).astype(np.float32), pack_blocks([random_weight(rng, "q4_k", 3000, 576)])
    outs = []
    try:
        for count in (1, 2, 5):
            kernels.set_threads(count)
            outs.append(kernel_calls.linear(x, packed, 3000))
    finally:
        kernels.set_threads(2)
    for other in outs[1:]:
        np.testing.assert_array_equal(other, outs[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_rows_may_be_packed_a_few_at_a_time(rng, monkeypatch, name, activation):
    """As they are read: the bytes are those of all at once, and so many as were foreseen."""
    counts = {name: 64, "q8_0 ": 33} if activation == "none" else {"q8_0 ": 49 + 32, name: 17}
    weights = [random_weight(rng, each.strip(), count, 288) for each, count in counts.items()]
    segments = cut(weights, activation)
    data = [half_panel_rows(each.weight.rows(slice(each.begin, each.end))).reshape(-1) for each in segments]
    assert [each.nbytes for each in segments] == [len(part) for part in data]
    monkeypatch.setattr("redraft.plugins.operators.linear.pack.AT_ONCE", 2 * 16 * 288)
    packed = pack_blocks(weights, activation)
    np.testing.assert_array_equal(packed.data, np.concatenate(data))
    assert packed.dtype == dtype_of(segments)


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "i4g96"])
def test_half_panels_have_their_stated_size(rng, name):
    """Bytes for 16 rows of 288 features: a form's floats, steps and codes."""
    sizes = {
        "q4_0": 9 * (32 + 256),
        "q4_k": 2 * 64 + 9 * (32 + 256),
        "q6_k": 2 * 32 + 9 * (32 + 384),
        "i4g96": 3 * 80 + 9 * 256,
    }
    assert half_panel_rows(random_weight(rng, name, 33, 288)).shape == (3, sizes[name])


def test_bad_segments_are_named(rng):
    pair = [random_weight(rng, "q4_0", 15, 64), random_weight(rng, "q4_0", 16, 64)]
    with pytest.raises(ValueError, match="a segment of 15 rows: expected a multiple of 16"):
        pack_blocks(pair)
    with pytest.raises(ValueError, match=r"segments of \[32, 64\] features: expected one width"):
        pack_blocks([pair[0], random_weight(rng, "q4_0", 16, 32)])
    x, packed = np.ones((1, 64), np.float32), pack_blocks(pair[:1])
    for dtype, said in (
        ("q4_0:16", "rows of all segments 16: expected as many as the weight has"),
        ("q4_0:8,q4_0:7", "rows of a segment 8: expected a multiple of 16"),
        ("q4_0:0,q4_0:15", "rows of a segment 0: expected at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            kernel_calls.linear(x, packed._replace(dtype=dtype), 15)
        with pytest.raises(ValueError, match=said):
            kernel_calls.embedding(np.zeros(1, np.int32), packed._replace(dtype=dtype), 64, 15)
    gated = PackedWeight(packed.data, "q4_0:32")
    with pytest.raises(ValueError, match="rows of a segment 32: expected gate rows or up rows only"):
        kernel_calls.linear(x, gated, 16, activation="swiglu")
