"""8-bit networks by explicit quantization: `QuantizeLinear` and `DequantizeLinear` (Q/DQ) around multiplications.

`int8` stores weights in int8, a scale for each output feature, and multiplies in the network's own dtype. `fp8` (E4M3)
also quantizes what is multiplied with them, one calibrated scale for each linear layer; it spares the LM head, which
loses most by it. Everything else keeps its dtype: the embedding (also where the LM head shares its weights), norms,
attention and its cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

INT8, FP8 = "int8", "fp8"
QUANTIZED = (INT8, FP8)
"""Precisions that are made by quantizing a network."""

SPARED = {INT8: (), FP8: ("lm_head",)}
"""Linear layers that keep their dtype."""
FEATURES = "feature_readers."
"""How the names of those begin that fuse features for a drafter, which keep it too: no calibration knows them."""
_DTYPES = {INT8: np.dtype(np.int8), FP8: np.dtype(ml_dtypes.float8_e4m3fn)}
_LARGEST = {INT8: 127.0, FP8: 448.0}


class Quantized(NamedTuple):
    """A matrix [N, K] as `values` int8 or float8 [N, K] and `scale` [N], which multiplies its rows."""

    values: np.ndarray
    scale: np.ndarray


def quantize_weight(weight: np.ndarray, precision: str, dtype: np.dtype) -> Quantized:
    """Quantize float [N, K], symmetrically and row by row; the scales are of `dtype`."""
    weight = weight.astype(np.float32)
    scale = scale_of(np.abs(weight).max(axis=1), precision, dtype)
    values = weight / scale.astype(np.float32)[:, None]
    return Quantized((np.rint(values) if precision == INT8 else values).astype(_DTYPES[precision]), scale)


def scale_of(largest: np.ndarray | float, precision: str, dtype: np.dtype) -> np.ndarray:
    """The scales, of `dtype`, that take values of magnitude 0 to `largest` to what the precision can store."""
    exact = np.asarray(largest, np.float32) / _LARGEST[precision]
    scale = exact.astype(dtype)
    scale = np.where(scale.astype(np.float32) < exact, np.nextafter(scale, np.array(np.inf, dtype)), scale)
    return np.where(scale == 0, np.array(1, dtype), scale).astype(dtype)


def quantize_network(network: ir.Model, precision: str, largest_inputs: Mapping[str, float] | None = None) -> ir.Model:
    """A copy of a target's network, or of a rank's part of it, in plugin or native form, with 8-bit linear layers.

    `precision` is int8 or fp8; for fp8 `largest_inputs` has the largest magnitude that each linear layer takes, by the
    layer's name (`layers.0.qkv`, ...). Raises ValueError for an unknown precision, for a layer that
    `largest_inputs` lacks, or where no linear layer is found.
    """
    if precision not in QUANTIZED:
        raise ValueError(f"precision {precision!r}: expected one of {', '.join(QUANTIZED)}")
    quantized = network.clone()
    linears = [node for node in quantized.graph if _weight(node) is not None]
    linears = [
        node
        for node in linears
        if linear_name(node) not in SPARED[precision] and not linear_name(node).startswith(FEATURES)
    ]
    if not linears:
        raise ValueError("the network has no linear layers (Gemm with a constant weight [N, K], transB 1)")
    if precision == FP8:
        expected = {linear_name(node) for node in linears}
        if missing := sorted(expected - set(largest_inputs or {})):
            raise ValueError(f"no largest input is known of {', '.join(missing[:3])} ({len(missing)} layers)")
    for node in linears:
        _quantize_linear(quantized.graph, node, precision, largest_inputs or {})
    RemoveUnusedNodesPass()(quantized)
    return quantized


def linear_name(node: ir.Node) -> str:
    """A linear layer's name in the target module."""
    weight = _weight(node)
    assert weight is not None
    assert weight.name is not None
    return weight.name.removeprefix("target.").removesuffix(".weight")


def _weight(node: ir.Node) -> ir.Value | None:
    """The constant weight [N, K] of a linear layer."""
    if node.op_type != "Gemm" or not node.attributes.get_int("transB", 0):
        return None
    weight = node.inputs[1]
    return weight if weight is not None and ir.convenience.get_const_tensor(weight) is not None else None


def _quantize_linear(graph: ir.Graph, node: ir.Node, precision: str, largest_inputs: Mapping[str, float]) -> None:
    name, weight, x = linear_name(node), _weight(node), node.inputs[0]
    assert weight is not None
    assert weight.const_value is not None
    assert x is not None
    matrix = weight.const_value.numpy()
    values, scale = quantize_weight(matrix, precision, matrix.dtype)
    stored, scales = _constant(graph, f"{name}.weight.{precision}", values), _constant(graph, f"{name}.scale", scale)
    node.replace_input_with(1, _before(graph, node, "DequantizeLinear", name, [stored, scales], weight, axis=0))
    if precision == FP8:
        scale_constant = _constant(
            graph, f"{name}.input_scale", scale_of(largest_inputs[name], precision, matrix.dtype)
        )
        zero = _constant(graph, f"zero.{precision}", np.zeros((), _DTYPES[precision]))
        narrow = _before(graph, node, "QuantizeLinear", f"{name}.input", [x, scale_constant, zero], x)
        narrow.type = zero.type
        node.replace_input_with(
            0, _before(graph, node, "DequantizeLinear", f"{name}.input", [narrow, scale_constant], x)
        )


def _constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    if name not in graph.initializers:
        graph.register_initializer(ir.val(name, const_value=ir.tensor(array, name=name)))
    return graph.initializers[name]


def _before(
    graph: ir.Graph, node: ir.Node, op: str, name: str, inputs: list[ir.Value], like: ir.Value, **attributes: int
) -> ir.Value:
    """The result, in shape and dtype like `like`, of a new node before `node`."""
    new = ir.node(op, inputs, attributes, name=f"{name}.{op}")
    new.outputs[0].name, new.outputs[0].shape, new.outputs[0].type = new.name, like.shape, like.type
    graph.insert_before(node, new)
    return new.outputs[0]
