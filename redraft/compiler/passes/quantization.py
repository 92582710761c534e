"""Quantized networks by explicit quantization: `QuantizeLinear` and `DequantizeLinear` (Q/DQ) around multiplications.

`int8` stores weights in int8, a scale for each output feature, and multiplies in the network's own dtype. `int4` stores
them in int4, a scale for each 32 features of a row, and the LM head in int8. `fp8` (E4M3) also quantizes what is
multiplied with them, one calibrated scale for each linear layer; it spares the LM head, which loses most by it.
Everything else keeps its dtype: the embedding (also where the LM head shares its weights), norms, attention and its
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from redraft.plugins.operators.linear.blocks import GROUP, BlockRows

INT8, INT4, FP8 = "int8", "int4", "fp8"
QUANTIZED = (INT8, INT4, FP8)
"""Precisions that are made by quantizing a network."""

LM_HEAD = "lm_head"
HEAD_PRECISIONS = {INT8: INT8, INT4: INT8, FP8: None}
"""What the LM head is quantized to beside each precision, if it is."""
FEATURES = "feature_readers."
"""How the names of those begin that fuse features for a drafter, which keep their dtype: no calibration knows them."""
_DTYPES = {INT8: np.dtype(np.int8), INT4: np.dtype(ml_dtypes.int4), FP8: np.dtype(ml_dtypes.float8_e4m3fn)}
_LARGEST = {INT8: 127.0, FP8: 448.0}
INT4_SPANS = (32, 64, 128)
"""The features that may share a scale in TensorRT."""
INT4_MIDDLE = 8
"""What TensorRT's int4 lacks of codes of 4 bits, which are unsigned."""
INT4_STEPS = (7.0, 7.5, 8.0, 8.5)
"""What a group's largest magnitude may become in int4, whose numbers are -8 to 7: what is beyond is cut."""


class Quantized(NamedTuple):
    """A matrix [N, K] as `values` int8, int4 or float8 [N, K] and `scale` [N], which multiplies its rows, or of int4
    [N, K / a span], their groups."""

    values: np.ndarray
    scale: np.ndarray


Stored = Callable[[str, np.dtype], Quantized | None]
"""A linear layer's weight in int4, from its name and the scales' dtype; None: it is rounded."""


def quantize_weight(weight: np.ndarray, precision: str, dtype: np.dtype) -> Quantized:
    """Quantize float [N, K], symmetrically and row by row, for int4 group by group; the scales are of `dtype`."""
    weight = weight.astype(np.float32)
    if precision == INT4:
        return _quantize_groups(weight, dtype)
    scale = scale_of(np.abs(weight).max(axis=1), _LARGEST[precision], dtype)
    values = weight / scale.astype(np.float32)[:, None]
    return Quantized((np.rint(values) if precision == INT8 else values).astype(_DTYPES[precision]), scale)


def _quantize_groups(weight: np.ndarray, dtype: np.dtype) -> Quantized:
    """Codes and scales: a group has that scale of INT4_STEPS whose square error is the least. TensorRT takes no zero
    points, so that what a group's numbers have in common costs range."""
    groups = weight.reshape(len(weight), -1, GROUP)
    largest = np.abs(groups).max(-1)
    best = np.full(largest.shape, np.inf, np.float32)
    scale, values = np.ones(largest.shape, dtype), np.zeros(groups.shape, np.int8)
    for steps in INT4_STEPS:
        tried = scale_of(largest, steps, dtype)
        wide = tried.astype(np.float32)[..., None]
        rounded = np.rint(groups / wide).clip(-8, 7)
        error = np.square(rounded * wide - groups).sum(-1)
        better = error < best
        best, scale = np.where(better, error, best), np.where(better, tried, scale)
        values = np.where(better[..., None], rounded.astype(np.int8), values)
    return Quantized(values.reshape(weight.shape).astype(_DTYPES[INT4]), scale)


def as_stored(matrix: Sequence[BlockRows], dtype: np.dtype) -> Quantized | None:
    """A matrix in int4 as its source stores it, one part below the other, with scales of `dtype`. None where TensorRT
    does not take it so: codes of other sizes, minima, zeros that are not the middle, scales below 0, columns in
    another order, groups of other sizes, or parts that differ."""
    form, features = matrix[0].form, matrix[0].shape[1]
    names = {part.name for part in form.parts}
    if form.bits != 4 or "minimum" in names or form.span not in INT4_SPANS or features % form.span:
        return None
    if any(rows.form != form or rows.feature_order is not None for rows in matrix):
        return None
    parts = [rows.rows(slice(None)) for rows in matrix]
    zeros = np.array(form.zero) if form.zero is not None else np.concatenate([part.parts["zero"] for part in parts])
    scale = np.concatenate([part.parts["scale"] for part in parts]).astype(dtype)
    if (zeros != INT4_MIDDLE).any() or not (scale > 0).all():
        return None
    codes = np.concatenate([part.codes for part in parts]).astype(np.int8) - np.int8(INT4_MIDDLE)
    return Quantized(codes.astype(_DTYPES[INT4]), scale)


def scale_of(largest: np.ndarray | float, steps: float, dtype: np.dtype) -> np.ndarray:
    """The scales, of `dtype`, that take values of magnitude 0 to `largest` to numbers up to `steps`."""
    exact = np.asarray(largest, np.float32) / np.float32(steps)
    scale = exact.astype(dtype)
    scale = np.where(scale.astype(np.float32) < exact, np.nextafter(scale, np.array(np.inf, dtype)), scale)
    return np.where(scale == 0, np.array(1, dtype), scale).astype(dtype)


def quantize_network(
    network: ir.Model,
    precision: str,
    largest_inputs: Mapping[str, float] | None = None,
    stored: Stored = lambda *_: None,
) -> ir.Model:
    """A copy of a target's network, or of a rank's part of it, in plugin or native form, with quantized linear layers.

    `precision` is int8, int4 or fp8; for fp8 `largest_inputs` has the largest magnitude that each linear layer takes,
    by the layer's name (`layers.0.qkv`, ...). `stored` has weights in int4. Raises ValueError for
    an unknown precision, for a layer that `largest_inputs` lacks, or where no linear layer is found.
    """
    if precision not in QUANTIZED:
        raise ValueError(f"precision {precision!r}: expected one of {', '.join(QUANTIZED)}")
    quantized = network.clone()
    linears = [node for node in quantized.graph if _weight(node) is not None]
    if not linears:
        raise ValueError("the network has no linear layers (Gemm with a constant weight [N, K], transB 1)")
    forms = {node: form for node in linears if (form := _layer_precision(node, precision))}
    if precision == FP8:
        expected = {linear_name(node) for node in forms}
        if missing := sorted(expected - set(largest_inputs or {})):
            raise ValueError(f"no largest input is known of {', '.join(missing[:3])} ({len(missing)} layers)")
    for node, form in forms.items():
        _quantize_linear(quantized.graph, node, form, largest_inputs or {}, stored)
    RemoveUnusedNodesPass()(quantized)
    return quantized


def linear_name(node: ir.Node) -> str:
    """A linear layer's name in the target module."""
    weight = _weight(node)
    assert weight is not None
    assert weight.name is not None
    return weight.name.removeprefix("target.").removesuffix(".weight")


def _layer_precision(node: ir.Node, precision: str) -> str | None:
    """What a linear layer is quantized to, if it is: int8 where a row is not whole groups of int4."""
    name, weight = linear_name(node), _weight(node)
    assert weight is not None
    assert weight.const_value is not None
    if name.startswith(FEATURES):
        return None
    if name == LM_HEAD:
        return HEAD_PRECISIONS[precision]
    return INT8 if precision == INT4 and weight.const_value.shape.numpy()[1] % GROUP else precision


def _weight(node: ir.Node) -> ir.Value | None:
    """The constant weight [N, K] of a linear layer."""
    if node.op_type != "Gemm" or not node.attributes.get_int("transB", 0):
        return None
    weight = node.inputs[1]
    return weight if weight is not None and ir.convenience.get_const_tensor(weight) is not None else None


def _quantize_linear(
    graph: ir.Graph, node: ir.Node, precision: str, largest_inputs: Mapping[str, float], given: Stored
) -> None:
    name, weight, x = linear_name(node), _weight(node), node.inputs[0]
    assert weight is not None
    assert weight.const_value is not None
    assert x is not None
    matrix = weight.const_value.numpy()
    as_given = given(name, matrix.dtype) if precision == INT4 else None
    values, scale = as_given or quantize_weight(matrix, precision, matrix.dtype)
    stored, scales = _constant(graph, f"{name}.weight.{precision}", values), _constant(graph, f"{name}.scale", scale)
    groups = {"axis": 1, "block_size": matrix.shape[1] // scale.shape[1]} if precision == INT4 else {"axis": 0}
    node.replace_input_with(1, _before(graph, node, "DequantizeLinear", name, [stored, scales], weight, **groups))
    if precision == FP8:
        scale_constant = _constant(
            graph, f"{name}.input_scale", scale_of(largest_inputs[name], _LARGEST[FP8], matrix.dtype)
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
