"""Lowers a mixture of experts, of which the exported network computes all for every row, to one operator that computes
those that a row's router chooses."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from redraft.compiler.passes.graph import (
    DOMAIN,
    Editor,
    constant_of,
    gated_product,
    input_of,
    inputs_of,
    only_user,
    rank_of,
    shape_of,
)

PLACING = ("Unsqueeze", "Expand", "Reshape", "Transpose")
"""What moves numbers and computes none."""


def lower_experts(editor: Editor, node: ir.Node) -> None:
    """A sum over experts [E, T, H] -> [T, H] of weight * (act(x @ gate) * (x @ up)) @ down, and the residual that it is
    added to, as one `Experts`; any other sum stays as it is."""
    product = _made_by(input_of(node, 0), "Mul")
    if not product:
        return
    down = next((made for value in inputs_of(product) if (made := _stack(value))), None)
    gated = _gated(down) if down else None
    if not down or not gated:
        return
    gate_up, activation = gated
    weights = next(value for value in inputs_of(product) if value is not down.outputs[0])
    above = list(_until(weights, "TopK"))
    topk = next((each for each in above if each.op_type == "TopK"), None)
    softmax = _made_by(input_of(topk, 0), "Softmax") if topk else None
    if not topk or not softmax:
        return
    packed = [editor.packed_weight(*_matrices(each), gated=each is gate_up) for each in (gate_up, down)]
    assert not any(each.feature_order for each in packed), "Experts takes features in their own order"
    operands = [_rows(input_of(gate_up, 0)), input_of(softmax, 0)]
    operands += [each.weight for each in packed]
    count, columns, hidden = _sizes(down)
    last = node
    if (add := only_user(node.outputs[0], "Add")) and rank_of(add.outputs[0]) == 2:
        last = add
        operands += [value for value in inputs_of(add) if value is not node.outputs[0]]
    attributes = {
        "count": count,
        "chosen": int(constant_of(input_of(topk, 1)).item()),  # type: ignore[union-attr]
        "normalized": int(any(each.op_type == "Div" for each in above)),
        "in_features": hidden,
        "columns": columns,
        "dtype": packed[0].dtype,
        "down_dtype": packed[1].dtype,
        "activation": activation,
    }
    (out,) = editor.node(last, "Experts", operands, attributes, DOMAIN)
    editor.replace(last, last.outputs[0], out)


def _stack(value: ir.Value) -> ir.Node | None:
    """The product with a constant stack of matrices that gives `value`."""
    product = _made_by(value, "MatMul")
    return product if product and rank_of(_matrices(product)[0]) == 3 else None


def _gated(down: ir.Node) -> tuple[ir.Node, str] | None:
    """The product with the experts' gates and up projections before `down`, and the activation between them."""
    last = _made_by(input_of(down, 0), "Mul")
    split = next((made for value in inputs_of(last) if (made := _made_by(value, "Split"))), None) if last else None
    first = _stack(input_of(split, 0)) if split else None
    product = gated_product(first) if first else None
    return (first, product[1]) if first and product and product[0] is last else None


def _matrices(product: ir.Node) -> tuple[ir.Value, bool]:
    """A product's constant matrices, and whether they lie as [in, out] rather than [out, in]; of rank 0 without any."""
    value, transposed = input_of(product, 1), True
    while (placed := value.producer()) and placed.op_type in PLACING:
        value, transposed = input_of(placed, 0), transposed != (placed.op_type == "Transpose")
    return (value, transposed) if constant_of(value) is not None else (ir.val("", shape=[]), transposed)


def _sizes(down: ir.Node) -> tuple[int, int, int]:
    """E, columns and hidden size of the down projections."""
    value, transposed = _matrices(down)
    count, *sizes = shape_of(value)
    columns, hidden = sizes if transposed else reversed(sizes)
    return count, columns, hidden


def _rows(value: ir.Value) -> ir.Value:
    """The rows [T, H] that all experts take."""
    while rank_of(value) != 2 and (placed := value.producer()) and placed.op_type in PLACING:
        value = input_of(placed, 0)
    return value


def _until(value: ir.Value, op_type: str) -> Iterator[ir.Node]:
    """The nodes that a value is made by, up to those of a type."""
    if node := value.producer():
        yield node
        if node.op_type != op_type:
            for above in inputs_of(node):
                yield from _until(above, op_type)


def _made_by(value: ir.Value, op_type: str) -> ir.Node | None:
    node = value.producer()
    return node if node and node.op_type == op_type else None
