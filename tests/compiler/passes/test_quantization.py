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
from redraft.compiler.passes.quantization import quantize_network, quantize_weight, scale_of
from redraft.model_defs.export.target import CacheShape, export_target_native, export_target_plugin
from redraft.model_defs.target.attention import causal_attend
from tests.engines.tiny import random_model, tiny_target

CACHE = CacheShape(1, 40, 8)
TEXTS = [[5, 9, 2, 77, 31], [1, 110, 3], list(range(20, 45))]
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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


@settings(max_examples=50)
@given(st.floats(1e-6, 6e4), st.sampled_from(["int8", "fp8"]), st.sampled_from(list(DTYPES)))
def test_the_largest_value_is_never_cut(largest, precision, dtype):
    scale = scale_of(largest, precision, np.dtype(DTYPES[dtype])).astype(np.float64)
    assert largest / scale <= {"int8": 127, "fp8": 448}[precision] * (1 + 1e-6)
    if largest > 1e-1:
        assert largest / scale >= {"int8": 127, "fp8": 448}[precision] * 0.98


def fake_quantized(target, precision, largest):
    """The target with weights, and for fp8 inputs, rounded to 8 bits in torch."""
    for name, layer in linear_layers(target).items():
        if precision == "fp8" and name == "lm_head":
            continue
        limit, narrow = (127, torch.int8) if precision == "int8" else (448, torch.float8_e4m3fn)
        scale = layer.weight.abs().amax(1, keepdim=True) / limit
        values = layer.weight / scale
        rounded = (values.round() if precision == "int8" else values).to(narrow).float()
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


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_onnx_runtime_computes_what_fake_quantization_does(precision, largest, tmp_path):
    """A wrong axis or rounding, a scale of another layer, a layer left out or one too many changes most logits."""
    ids, target = TEXTS[2], tiny_target()
    logits = run(quantize_network(export_target_native(target, CACHE), precision, largest), ids, tmp_path)
    faked = fake_quantized(target, precision, largest)
    want = faked.lm_head(faked(torch.tensor([ids]), causal_attend(target.config, len(ids))).hidden)[0].numpy()
    # An input that lies between two float8 numbers may be rounded to either, by the order of a sum.
    close = np.abs(logits - want) < 1e-3
    assert close.all() if precision == "int8" else close.mean() > 0.97
    assert np.abs(logits - want).max() < 0.5


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("export", [export_target_native, export_target_plugin])
def test_nothing_but_multiplications_is_touched(export, precision, dtype, largest):
    """Strong typing: a multiplication's inputs have one dtype, which is the network's."""
    options = {} if export is export_target_native else {"cache_dtype": TORCH_DTYPES[dtype]}
    network = export(tiny_target().to(TORCH_DTYPES[dtype]), CACHE, **options)
    before = [str(node) for node in network.graph]
    quantized = quantize_network(network, precision, largest)
    assert [str(node) for node in network.graph] == before
    kinds = Counter(node.op_type for node in quantized.graph)
    added = Counter(DequantizeLinear=9) if precision == "int8" else Counter(DequantizeLinear=16, QuantizeLinear=8)
    assert kinds == Counter(node.op_type for node in network.graph) + added
    kind = network.graph.initializers["target.norm.weight"].dtype
    for node in quantized.graph:
        if node.op_type == "Gemm":
            assert {value.dtype for value in node.inputs} == {kind}
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert node.inputs[1].dtype == kind
            narrow = ir.DataType.INT8 if precision == "int8" else ir.DataType.FLOAT8E4M3FN
            value = node.inputs[0] if node.op_type == "DequantizeLinear" else node.outputs[0]
            assert value.dtype == narrow
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
    with pytest.raises(ValueError, match="precision 'int4': expected one of int8, fp8"):
        quantize_network(network, "int4")
    with pytest.raises(ValueError, match=r"no largest input is known of layers\.0\.attention_out, .*\(8 layers\)"):
        quantize_network(network, "fp8")
    known = {name: value for name, value in largest.items() if name != "layers.1.down"}
    with pytest.raises(ValueError, match=r"no largest input is known of layers\.1\.down \(1 layers\)"):
        quantize_network(network, "fp8", known)
    quantized = quantize_network(network, "int8")
    with pytest.raises(ValueError, match="has no linear layers"):
        quantize_network(quantized, "int8")
