"""Rewrites a plugin-form network for the CPU engine: multiplications with constant weights become
`redraft.cpu` operators with packed weights, together with the norm, bias, activation and residual around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from redraft.compiler.passes.experts import lower_experts
from redraft.compiler.passes.graph import (
    DOMAIN,
    BlocksOf,
    Editor,
    constant_of,
    gated_product,
    input_of,
    only_user,
    other_input,
    rank_of,
    shape_of,
    silu_product,
)
from redraft.plugins.operators.linear.pack import check_precision

OPTIONAL_INPUTS = ("bias", "norm", "norm_bias", "residual", "rows", "residual_rows", "ids")
NORMS = {"RMSNormalization": ("norm",), "LayerNormalization": ("norm", "norm_bias")}
"""The inputs of ours that a norm's weights become."""


def lower(model: ir.Model, precision: str, blocks_of: BlocksOf | None = None) -> ir.Model:
    """A copy of a plugin-form network whose heavy operators are those of plugins/.

    `precision`, one of `PRECISIONS`, is how weights are stored and multiplied that `blocks_of` does not give in blocks;
    activations stay float32. Packed weights replace the originals, once each where several operators share one.
    Raises ValueError for an unknown precision.
    """
    check_precision(precision)
    lowered = model.clone()
    lowered.opset_imports[DOMAIN] = 1
    editor = Editor(lowered.graph, precision, blocks_of)
    for node in list(lowered.graph):
        if node.op_type == "Slice":
            _fold_slice(editor, node)
        elif node.op_type in ("MatMul", "Gemm"):
            _lower_projection(editor, node)
        elif node.op_type == "Gather":
            _lower_embedding(editor, node)
        elif node.op_type == "Concat":
            _lower_stack(editor, node)
        elif node.op_type == "ReduceSum":
            lower_experts(editor, node)
    RemoveUnusedNodesPass()(lowered)
    for node in list(lowered.graph):
        if node.op_type in NORMS:
            _lower_norm(editor, node)
    RemoveUnusedNodesPass()(lowered)
    return lowered


def _lower_projection(editor: Editor, node: ir.Node) -> None:
    """x @ W and what surrounds it as one Linear, or as one LinearTopK."""
    weight, transposed = _weight(node)
    if weight is None:
        return
    in_features, out_features = shape_of(weight)[:: 1 if transposed else -1]
    last = node
    optional: dict[str, ir.Value] = {}
    if len(node.inputs) > 2:
        optional["bias"] = input_of(node, 2)
    elif (add := only_user(last.outputs[0], "Add")) and shape_of(bias := other_input(add, last)) == (out_features,):
        last, optional["bias"] = add, bias

    x, norm_eps = _prologue(input_of(node, 0), optional)
    x = editor.reshape(node, x, [-1, in_features])
    attributes: dict[str, Any] = {"in_features": in_features, "norm_eps": norm_eps}
    if (softmax := only_user(last.outputs[0], "LogSoftmax")) and (topk := only_user(softmax.outputs[0], "TopK")):
        k = int(constant_of(input_of(topk, 1)).item())  # type: ignore[union-attr]
        stored = editor.packed_weight(weight, transposed)
        assert stored.feature_order is None, "LinearTopK takes features in their own order"
        attributes |= {"out_features": out_features, "dtype": stored.dtype, "k": k}
        if renumbered := _renumbered(editor, topk.outputs[1]):
            result, table = renumbered
            optional["ids"] = table
        values, indices = _operator(editor, topk, "LinearTopK", [x, stored.weight], optional, attributes)
        editor.replace(topk, topk.outputs[0], values)
        if renumbered:
            editor.replace(topk, result, indices)
        else:
            (wide,) = editor.node(topk, "Cast", [indices], {"to": ir.DataType.INT64})
            editor.replace(topk, topk.outputs[1], wide)
        return

    activation = "none"
    if gated := gated_product(last):
        (last, activation), out_features = gated, out_features // 2
    elif activated := silu_product(last.outputs[0]):
        last, activation = activated, "silu"
    elif activated := only_user(last.outputs[0], "Relu"):
        last, activation = activated, "relu"
    if (add := only_user(last.outputs[0], "Add")) and rank_of(add.outputs[0]) == 2 and not gated:
        other = other_input(add, last)
        if constant_of(other) is None and other.shape == last.outputs[0].shape:
            last, optional["residual"] = add, other
            if chosen := _chosen_rows(other):
                optional["residual"], optional["residual_rows"] = chosen
            if activation == "none" and (activated := silu_product(add.outputs[0])):
                last, activation = activated, "silu_last"
    stored = editor.packed_weight(weight, transposed, gated is not None)
    if stored.feature_order:
        x = _reordered(editor, node, x, stored.feature_order, optional)
    attributes |= {"out_features": out_features, "dtype": stored.dtype, "activation": activation}
    (out,) = _operator(editor, last, "Linear", [x, stored.weight], optional, attributes)
    editor.replace(last, last.outputs[0], out)


def _reordered(
    editor: Editor, before: ir.Node, x: ir.Value, order: ir.Value, optional: dict[str, ir.Value]
) -> ir.Value:
    """x with its features in the order of a weight's, which the norm's weights take too."""
    for name in ("norm", "norm_bias"):
        if name in optional:
            weight, features = constant_of(optional[name]), constant_of(order)
            assert weight is not None
            assert features is not None
            optional[name] = editor.constant(f"{optional[name].name}.{order.name}", weight[features])
    return editor.node(before, "ReorderFeatures", [x, order], domain=DOMAIN)[0]


def _operator(
    editor: Editor, before: ir.Node, op: str, fixed: list[ir.Value], inputs: dict[str, ir.Value], attributes: dict
) -> list[ir.Value]:
    """An operator of fixed and optional inputs."""
    names = [name for name in OPTIONAL_INPUTS if name in inputs]
    operands = [*fixed, *(inputs[name] for name in names)]
    attributes = {**attributes, "inputs": ",".join(names)}
    return editor.node(before, op, operands, attributes, DOMAIN, outputs=2 if op == "LinearTopK" else 1)


def _prologue(x: ir.Value, optional: dict[str, ir.Value]) -> tuple[ir.Value, float]:
    """Moves a choice of rows and a norm in front of a projection, in any order, into its inputs; returns x and the
    norm's epsilon."""
    if chosen := _chosen_rows(x):
        x, optional["rows"] = chosen
    epsilon = 0.0
    if norm := _norm(x):
        x, weights, epsilon = norm
        optional |= weights
    if "rows" not in optional and (chosen := _chosen_rows(x)):
        x, optional["rows"] = chosen
    return x, epsilon


def _norm(x: ir.Value) -> tuple[ir.Value, dict[str, ir.Value], float] | None:
    """What the norm over the last dimension that gives `x` takes, its weights by our inputs' names, and its epsilon."""
    node = x.producer()
    names = NORMS.get(node.op_type, ()) if node else ()
    if not node or not names or len(node.inputs) != 1 + len(names):
        return None
    if node.attributes.get_int("axis", -1) not in (-1, rank_of(x) - 1):
        return None
    weights = {name: input_of(node, i) for i, name in enumerate(names, 1)}
    return input_of(node, 0), weights, node.attributes.get_float("epsilon", 1e-5)


def _chosen_rows(x: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The data [rows, features] and row numbers int32 [n] of which x [n, features] is made."""
    gather = x.producer()
    if not gather or gather.op_type != "Gather" or gather.attributes.get_int("axis", 0) != 0:
        return None
    data, rows = input_of(gather, 0), input_of(gather, 1)
    fits = rank_of(data) == 2 and rank_of(rows) == 1 and rows.dtype == ir.DataType.INT32
    return (data, rows) if fits and constant_of(data) is None else None


def _renumbered(editor: Editor, indices: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The value table[indices] int32 and its constant, one-dimensional table, if nothing else takes the indices."""
    unsqueeze = only_user(indices, "Unsqueeze")
    gather = only_user(unsqueeze.outputs[0], "GatherND") if unsqueeze else None
    cast = only_user(gather.outputs[0], "Cast") if gather else None
    if not gather or not cast or cast.attributes["to"].value != ir.DataType.INT32:
        return None
    table = constant_of(input_of(gather, 0))
    if table is None or table.ndim != 1:
        return None
    return cast.outputs[0], editor.constant(f"{input_of(gather, 0).name}.int32", table.astype(np.int32))


def _lower_embedding(editor: Editor, node: ir.Node) -> None:
    """Rows of a table, times a number, plus those of another table."""
    table = _table(node)
    if table is None:
        return
    rows, features = shape_of(table)
    ids, clamped = _clamped(input_of(node, 1), rows)
    stored = editor.packed_weight(table, transposed=False)
    assert stored.feature_order is None, "Embedding gives features in their own order"
    last, factor = node, 1.0
    optional: dict[str, ir.Value] = {}
    product = only_user(last.outputs[0], "Mul")
    number = constant_of(other_input(product, last)) if product else None
    if product and number is not None and number.ndim == 0:
        last, factor = product, number.item()
    if (add := only_user(last.outputs[0], "Add")) and rank_of(add.outputs[0]) == 2:
        other = other_input(add, last)
        if _table(other.producer()) is not None and other.shape == last.outputs[0].shape:
            last, optional = add, optional | {"residual": other}
    ids = editor.reshape(last, ids, [-1])
    if ids.dtype != ir.DataType.INT32:
        (ids,) = editor.node(last, "Cast", [ids], {"to": ir.DataType.INT32})
    attributes = {"in_features": features, "out_features": rows, "dtype": stored.dtype}
    attributes |= {"clamped": int(clamped), "factor": factor}
    (out,) = _operator(editor, last, "Embedding", [ids, stored.weight], optional, attributes)
    editor.replace(last, last.outputs[0], out)


def _table(node: ir.Node | None) -> ir.Value | None:
    """The constant matrix of which a node takes rows."""
    if not node or node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return None
    table = input_of(node, 0)
    usable = constant_of(table) is not None and rank_of(table) == 2 and table.dtype == ir.DataType.FLOAT
    return table if usable else None


def _clamped(ids: ir.Value, rows: int) -> tuple[ir.Value, bool]:
    """The ids before ids beyond the last of `rows` rows become the last one, and whether they do."""
    node = ids.producer()
    last = constant_of(input_of(node, 1)) if node and node.op_type == "Min" and len(node.inputs) == 2 else None
    return (input_of(node, 0), True) if node and last is not None and last.tolist() == rows - 1 else (ids, False)


def _lower_stack(editor: Editor, node: ir.Node) -> None:
    """Rows side by side [B, L * K] that are taken one by one [B * L, K]."""
    reshape = only_user(node.outputs[0], "Reshape")
    shapes = {shape_of(input_of(node, i))[1:] for i in range(len(node.inputs))}
    if not reshape or len(shapes) != 1 or shape_of(reshape.outputs[0])[1:] != next(iter(shapes)):
        return
    if node.attributes.get_int("axis") % 2 == 1 and rank_of(input_of(node, 0)) == 2:
        (out,) = editor.node(reshape, "Stack", [input_of(node, i) for i in range(len(node.inputs))], domain=DOMAIN)
        editor.replace(reshape, reshape.outputs[0], out)


def _fold_slice(editor: Editor, node: ir.Node) -> None:
    """A part of a constant becomes a constant."""
    data, *ranges = (constant_of(value) for value in node.inputs if value is not None)
    if data is None or len(ranges) != 4 or any(array is None for array in ranges):
        return
    cut = [slice(None)] * data.ndim
    for start, end, axis, step in np.stack(ranges, axis=1).tolist():  # type: ignore[arg-type]
        cut[axis] = slice(start, end, step)
    part = editor.constant(f"{input_of(node, 0).name}.{node.outputs[0].name}", np.ascontiguousarray(data[tuple(cut)]))
    node.outputs[0].replace_all_uses_with(part)


def _lower_norm(editor: Editor, node: ir.Node) -> None:
    norm = _norm(node.outputs[0])
    if not norm:
        return
    (x, inputs, epsilon), last = norm, node
    weight = inputs.pop("norm")
    if (add := only_user(node.outputs[0], "Add")) and (other := other_input(add, node)).shape == node.outputs[0].shape:
        last, inputs["residual"] = add, other
    (out,) = _operator(editor, last, "Norm", [x, weight], inputs, {"eps": epsilon})
    out.shape = last.outputs[0].shape
    editor.replace(last, last.outputs[0], out)


def _weight(node: ir.Node) -> tuple[ir.Value | None, bool]:
    """A multiplication's constant matrix, and whether it lies as [in, out] rather than [out, in]."""
    value, transposed = input_of(node, 1), node.attributes.get_int("transB", 0) == 0
    producer = value.producer()
    if producer and producer.op_type == "Transpose":
        value, transposed = input_of(producer, 0), not transposed
    scaled = any(node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta"))
    usable = constant_of(value) is not None and rank_of(value) == 2 and not node.attributes.get_int("transA", 0)
    return (value if usable and not scaled else None), transposed
