"""Explicit quantization: what is stored, and what the networks compute, against fake quantization in torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.compiler.calibration import calibrate, linear_layers
from redraft.compiler.passes.quantization import INT4_STEPS, as_stored, quantize_network, quantize_weight, scale_of
from redraft.model_defs.export.target import CacheShape, export_target_native, export_target_plugin
from redraft.model_defs.target.attention import causal_attend
from redraft.plugins.operators.linear.blocks import BlockWeight, block_form
from tests.engines.tiny import random_model, tiny_target

CACHE = CacheShape(1, 40, 8)
TEXTS = [[5, 9, 2, 77, 31], [1, 110, 3], list(range(20, 45))]
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
STORED = {
    "int8": {ir.DataType.INT8: 9},
    "int4": {ir.DataType.INT4: 6, ir.DataType.INT8: 3},
    "fp8": {ir.DataType.FLOAT8E4M3FN: 24},
}
"""Quantized values: for int4 the LM head, and rows of 200 features, which are not whole groups, in int8."""


@pytest.fixture(scope="module")
def largest() -> dict[str, float]:
    return calibrate(tiny_target(), "", TEXTS).largest_inputs


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_rows_have_scales_of_their_own(precision, dtype):
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(7, 13)) * 10.0 ** np.arange(-5, 2)[:, None]).astype(dtype).astype(np.float32)
    weight[3] = 0
    values, scale = quantize_weight(weight.astype(dtype), precision, np.dtype(dtype))
    assert (values.shape, scale.shape, scale.dtype) == ((7, 13), (7,), dtype)
    back = values.astype(np.float32) * scale.astype(np.float32)[:, None]
    # fp16 holds the smallest scales, below its normal numbers, in steps of 6e-8: so much of the range is not used.
    step = np.abs(weight).max(1, keepdims=True) / 127 + (6e-8 if dtype is np.float16 else 0)
    allowed = step * 0.51 if precision == "int8" else np.abs(weight) / 15 + step / 100
    assert (np.abs(back - weight) <= allowed * (1.02 if dtype is ml_dtypes.bfloat16 else 1)).all()
    assert not back[3].any()


def test_groups_have_scales_of_their_own():
    """The largest of a group may be cut where that errs less, and scales are positive, as TensorRT needs them."""
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(7, 3, 32)) * 10.0 ** np.arange(-3, 4)[:, None, None]).astype(np.float32)
    weight[3, 1] = 0
    values, scale = quantize_weight(weight.reshape(7, 96), "int4", np.dtype(np.float32))
    assert (values.shape, values.dtype, scale.shape) == ((7, 96), ml_dtypes.int4, (7, 3))
    assert (scale > 0).all()
    codes = values.astype(np.float32).reshape(7, 3, 32)
    error = codes * scale[..., None] - weight
    plain = np.abs(weight).max(-1, keepdims=True) / 7
    plain[plain == 0] = 1
    assert (np.square(error).sum(-1) <= np.square(np.rint(weight / plain) * plain - weight).sum(-1) * 1.0001).all()
    inside = (codes > -8) & (codes < 7)
    assert (np.abs(error) <= np.broadcast_to(scale[..., None], error.shape) * 0.51)[inside].all()
    assert not codes[3, 1].any()
    assert (codes.min(), codes.max()) == (-8, 7), "all sixteen numbers are used"


def symmetric(form: str = "i4g64", zero: int = 8, columns: np.ndarray | None = None) -> BlockWeight:
    """Random codes [7, 128] around a zero, and scales that float16 holds."""
    rng, span = np.random.default_rng(0), block_form(form).span
    groups = -(-128 // span)
    scale = rng.uniform(0.1, 2, (7, groups)).astype(np.float16).astype(np.float32)
    parts = {"scale": scale, "zero": np.full((7, groups), zero, np.uint8)}
    return BlockWeight(block_form(form), rng.integers(0, 16, (7, 128), np.uint8), parts, columns)


def test_symmetric_weights_are_taken_as_their_source_stores_them():
    """Also of several parts, such as queries, keys and values."""
    weight = symmetric()
    taken = as_stored([weight.rows(slice(3)), weight.rows(slice(3, 7))], np.dtype(np.float16))
    assert taken is not None
    assert (taken.values.dtype, taken.scale.dtype) == (ml_dtypes.int4, np.float16)
    products = taken.values.astype(np.float32).reshape(7, 2, 64) * taken.scale.astype(np.float32)[..., None]
    np.testing.assert_array_equal(products.reshape(7, 128), weight.dequantized())


@pytest.mark.parametrize(
    "matrix",
    [
        [symmetric(zero=7)],
        [symmetric("i8g64", zero=128)],
        [symmetric("i4g96")],
        [symmetric("i4g256")],
        [symmetric(columns=np.arange(128, dtype=np.int32)[::-1])],
        [symmetric(), symmetric("i4g32")],
        [BlockWeight.quantized(np.random.default_rng(0).normal(size=(7, 128)), "int4")],
    ],
    ids=["zero", "8 bits", "96", "256", "columns", "two forms", "minimum"],
)
def test_what_tensorrt_has_no_form_for_is_not_taken(matrix):
    assert as_stored(matrix, np.dtype(np.float16)) is None


def test_weights_of_the_source_are_put_into_the_network():
    """Where there are any; their groups may be longer than those that are rounded to."""
    given = quantize_weight(np.ones((96, 96), np.float32), "int4", np.dtype(np.float32))
    asked = []

    def stored(name: str, dtype: np.dtype):
        asked.append((name, dtype))
        return given if name == "layers.1.attention_out" else None

    constants = quantize_network(export_target_native(tiny_target(), CACHE), "int4", stored=stored).graph.initializers
    names = ("qkv", "attention_out", "gate_up")
    assert asked == [(f"layers.{layer}.{name}", np.float32) for layer in range(2) for name in names]
    taken = constants["layers.1.attention_out.weight.int4"].const_value.numpy()
    np.testing.assert_array_equal(taken.astype(np.int8), given.values.astype(np.int8))


@settings(max_examples=50)
@given(st.floats(1e-6, 6e4), st.sampled_from([7.5, 127.0, 448.0]), st.sampled_from(list(DTYPES)))
def test_the_largest_value_is_never_cut(largest, steps, dtype):
    scale = scale_of(largest, steps, np.dtype(DTYPES[dtype])).astype(np.float64)
    assert largest / scale <= steps * (1 + 1e-6)
    if largest > 1e-1:
        assert largest / scale >= steps * 0.98


def in_int4(weight: torch.Tensor) -> torch.Tensor:
    """Each 32 features of a row by the scale that errs least."""
    groups = weight.unflatten(-1, (-1, 32))
    scales = [groups.abs().amax(-1, keepdim=True) / steps for steps in INT4_STEPS]
    rounded = torch.stack([(groups / scale).round().clamp(-8, 7) * scale for scale in scales])
    best = (rounded - groups).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return rounded.take_along_dim(best, 0)[0].flatten(-2)


def fake_quantized(target, precision, largest):
    """The target with weights, and for fp8 inputs, rounded in torch."""
    for name, layer in linear_layers(target).items():
        if precision == "int4" and name != "lm_head" and layer.in_features % 32 == 0:
            layer.weight = torch.nn.Parameter(in_int4(layer.weight), requires_grad=False)
            continue
        if precision == "fp8" and name == "lm_head":
            continue
        limit, narrow = (448, torch.float8_e4m3fn) if precision == "fp8" else (127, torch.int8)
        scale = layer.weight.abs().amax(1, keepdim=True) / limit
        values = layer.weight / scale
        rounded = (values if precision == "fp8" else values.round()).to(narrow).float()
        layer.weight = torch.nn.Parameter(rounded * scale, requires_grad=False)
        if precision == "fp8":
            s = largest[name] / limit
            layer.register_forward_pre_hook(
                lambda _, x, s=s: ((x[0] / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s,)
            )
    return target


def run(network: ir.Model, ids: list[int], folder) -> np.ndarray:
    """Logits of a text from a native-form network in ONNX Runtime."""
    ir.save(network, folder / "n.onnx")
    session = onnxruntime.InferenceSession(folder / "n.onnx", providers=["CPUExecutionProvider"])
    count, dtype = len(ids), np.float16 if "float16" in session.get_inputs()[3].type else np.float32
    rows = np.arange(count)
    inputs = {"input_ids": np.array([ids], np.int32), "positions": rows[None], "write_indices": np.zeros(1, np.int64)}
    inputs |= {"mask": np.triu(np.full((1, 1, count, CACHE.rows), -3e4, dtype), 1), "logit_rows": rows.astype(np.int32)}
    caches = [value.name for value in session.get_inputs() if "_cache" in value.name]
    inputs |= {name: np.zeros((1, 1, CACHE.rows, 32), dtype) for name in caches}
    return session.run(["logits"], inputs)[0].astype(np.float32)


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_onnx_runtime_computes_what_fake_quantization_does(precision, largest, tmp_path):
    """A wrong axis or rounding, a scale of another layer, a layer left out or one too many changes most logits."""
    ids, target = TEXTS[2], tiny_target()
    logits = run(quantize_network(export_target_native(target, CACHE), precision, largest), ids, tmp_path)
    faked = fake_quantized(target, precision, largest)
    want = faked.lm_head(faked(torch.tensor([ids]), causal_attend(target.config, len(ids))).hidden)[0].numpy()
    # An input that lies between two float8 numbers may be rounded to either, by the order of a sum.
    close = np.abs(logits - want) < 1e-3
    assert close.mean() > 0.97 if precision == "fp8" else close.all()
    assert np.abs(logits - want).max() < 0.5


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("export", [export_target_native, export_target_plugin])
def test_nothing_but_multiplications_is_touched(export, precision, dtype, largest):
    """Strong typing: a multiplication's inputs have one dtype, which is the network's."""
    options = {} if export is export_target_native else {"cache_dtype": TORCH_DTYPES[dtype]}
    network = export(tiny_target().to(TORCH_DTYPES[dtype]), CACHE, **options)
    before = [str(node) for node in network.graph]
    quantized = quantize_network(network, precision, largest)
    assert [str(node) for node in network.graph] == before
    kinds = Counter(node.op_type for node in quantized.graph)
    added = Counter(DequantizeLinear=16, QuantizeLinear=8) if precision == "fp8" else Counter(DequantizeLinear=9)
    assert kinds == Counter(node.op_type for node in network.graph) + added
    kind, stored = network.graph.initializers["target.norm.weight"].dtype, Counter()
    for node in quantized.graph:
        if node.op_type == "Gemm":
            assert {value.dtype for value in node.inputs} == {kind}
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert node.inputs[1].dtype == kind
            value = node.inputs[0] if node.op_type == "DequantizeLinear" else node.outputs[0]
            stored[value.dtype] += 1
    assert stored == STORED[precision]
    assert [value.name for value in quantized.graph.outputs] == [value.name for value in network.graph.outputs]


def test_a_head_that_shares_the_embeddings_weights_leaves_the_embedding(largest):
    target = random_model(replace(tiny_target().config, tie_embeddings=True))
    quantized = quantize_network(export_target_native(target, CACHE), "int8")
    gather = next(node for node in quantized.graph if node.op_type == "Gather")
    assert gather.inputs[0].dtype == ir.DataType.FLOAT
    np.testing.assert_array_equal(gather.inputs[0].const_value.numpy(), target.embedding.weight.numpy())
    assert quantized.graph.initializers["lm_head.weight.int8"].shape == (111, 96)


def test_what_cannot_be_quantized_is_refused(largest):
    network = export_target_native(tiny_target(), CACHE)
    with pytest.raises(ValueError, match="precision 'int2': expected one of int8, int4, fp8"):
        quantize_network(network, "int2")
    with pytest.raises(ValueError, match=r"no largest input is known of layers\.0\.attention_out, .*\(8 layers\)"):
        quantize_network(network, "fp8")
    known = {name: value for name, value in largest.items() if name != "layers.1.down"}
    with pytest.raises(ValueError, match=r"no largest input is known of layers\.1\.down \(1 layers\)"):
        quantize_network(network, "fp8", known)
    quantized = quantize_network(network, "int8")
    with pytest.raises(ValueError, match="has no linear layers"):
        quantize_network(quantized, "int8")
