"""Rewrites a plugin-form network for the CPU engine: multiplications with constant weights become
`redraft.cpu` operators with packed weights, together with the norm, bias, SwiGLU or SiLU and residual around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from redraft.plugins.operators.linear.pack import pack

DOMAIN = "redraft.cpu"
OPTIONAL_INPUTS = ("scale", "bias", "norm", "residual", "rows", "residual_rows", "ids")


def lower(model: ir.Model, precision: str) -> ir.Model:
    """A copy of a plugin-form network whose heavy operators are those of plugins/.

    `precision` fp32, bf16, int8 or w8a8 is how weights are stored and multiplied; activations stay float32. Packed
    weights replace the originals, once each where several operators share one. Raises ValueError for an unknown
    precision.
    """
    lowered = model.clone()
    lowered.opset_imports[DOMAIN] = 1
    editor = _Editor(lowered.graph, precision)
    for node in list(lowered.graph):
        if node.op_type == "Slice":
            _fold_slice(editor, node)
        elif node.op_type in ("MatMul", "Gemm"):
            _lower_projection(editor, node)
        elif node.op_type == "Gather":
            _lower_embedding(editor, node)
        elif node.op_type == "Concat":
            _lower_stack(editor, node)
        elif node.op_type == "TreeAttention":
            _lower_head_norms(node)
    RemoveUnusedNodesPass()(lowered)
    for node in list(lowered.graph):
        if node.op_type == "RMSNormalization":
            _lower_norm(editor, node)
    RemoveUnusedNodesPass()(lowered)
    return lowered


class _Editor:
    """Adds nodes and constants to a graph."""

    def __init__(self, graph: ir.Graph, precision: str):
        self.graph, self.precision = graph, precision
        self.packed: dict[tuple[str, bool, bool], dict[str, ir.Value]] = {}

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        if name not in self.graph.initializers:
            self.graph.register_initializer(ir.val(name, const_value=ir.tensor(array, name=name)))
        return self.graph.initializers[name]

    def packed_weight(self, weight: ir.Value, transposed: bool, gated: bool = False) -> dict[str, ir.Value]:
        """The packed weight as "weight" and, with int8 weights, its "scale"."""
        key = (str(weight.name), transposed, gated)
        if key not in self.packed:
            matrix = _constant(weight)
            assert matrix is not None
            packed = pack(matrix.T if transposed else matrix, self.precision, "swiglu" if gated else "none")
            name = f"{weight.name}.{self.precision}{'.gated' if gated else ''}"
            self.packed[key] = {"weight": self.constant(name, packed.data)}
            if packed.scale is not None:
                self.packed[key]["scale"] = self.constant(f"{name}.scale", packed.scale)
        return self.packed[key]

    def node(
        self,
        before: ir.Node,
        op: str,
        inputs: list[ir.Value],
        attributes: dict[str, Any] | None = None,
        domain: str = "",
        outputs: int = 1,
    ) -> list[ir.Value]:
        node = ir.node(op, inputs, attributes, domain=domain, num_outputs=outputs, name=f"{before.name}.{op}")
        for i, output in enumerate(node.outputs):
            output.name = f"{node.name}.{i}"
        self.graph.insert_before(before, node)
        return list(node.outputs)

    def reshape(self, before: ir.Node, x: ir.Value, shape: list[int]) -> ir.Value:
        if _rank(x) == len(shape):
            return x
        constant = self.constant("shape." + ".".join(map(str, shape)), np.array(shape, dtype=np.int64))
        return self.node(before, "Reshape", [x, constant])[0]

    def replace(self, before: ir.Node, old: ir.Value, new: ir.Value) -> None:
        """`new` [rows, ...] takes the place, shape and name of `old` [..., the same]."""
        assert old.shape is not None
        if _rank(old) != _rank(new, default=min(_rank(old), 2)):
            variable = [d for d in old.shape if not isinstance(d, int)]
            if len(variable) > 1:
                raise ValueError(f"{old.name} has shape {old.shape}: expected at most one variable dimension")
            shape = [d if isinstance(d, int) else -1 for d in old.shape]
            new = self.node(before, "Reshape", [new, self.constant(f"{old.name}.shape", np.array(shape, np.int64))])[0]
        name, new.shape, new.type = old.name, old.shape, old.type
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = f"{name}.unfused", name


def _lower_projection(editor: _Editor, node: ir.Node) -> None:
    """x @ W and what surrounds it as one Linear, or as one LinearTopK."""
    weight, transposed = _weight(node)
    if weight is None:
        return
    in_features, out_features = _shape(weight)[:: 1 if transposed else -1]
    last = node
    optional: dict[str, ir.Value] = {}
    if len(node.inputs) > 2:
        optional["bias"] = _input(node, 2)
    elif (add := _only_user(last.outputs[0], "Add")) and _shape(bias := _other_input(add, last)) == (out_features,):
        last, optional["bias"] = add, bias

    x, norm_eps = _prologue(_input(node, 0), optional)
    x = editor.reshape(node, x, [-1, in_features])
    attributes = {"in_features": in_features, "dtype": editor.precision, "norm_eps": norm_eps}
    if (softmax := _only_user(last.outputs[0], "LogSoftmax")) and (topk := _only_user(softmax.outputs[0], "TopK")):
        k = int(_constant(_input(topk, 1)).item())  # type: ignore[union-attr]
        optional = editor.packed_weight(weight, transposed) | optional
        attributes |= {"out_features": out_features, "k": k}
        if renumbered := _renumbered(editor, topk.outputs[1]):
            result, table = renumbered
            optional["ids"] = table
        values, indices = _projection(editor, topk, "LinearTopK", x, optional, attributes)
        editor.replace(topk, topk.outputs[0], values)
        if renumbered:
            editor.replace(topk, result, indices)
        else:
            (wide,) = editor.node(topk, "Cast", [indices], {"to": ir.DataType.INT64})
            editor.replace(topk, topk.outputs[1], wide)
        return

    activation = "none"
    if gated := _gated(last):
        (last, activation), out_features = gated, out_features // 2
    elif activated := _silu(last.outputs[0]):
        last, activation = activated, "silu"
    if (add := _only_user(last.outputs[0], "Add")) and _rank(add.outputs[0]) == 2 and not gated:
        other = _other_input(add, last)
        if _constant(other) is None and other.shape == last.outputs[0].shape:
            last, optional["residual"] = add, other
            if chosen := _chosen_rows(other):
                optional["residual"], optional["residual_rows"] = chosen
            if activation == "none" and (activated := _silu(add.outputs[0])):
                last, activation = activated, "silu_last"
    optional = editor.packed_weight(weight, transposed, gated is not None) | optional
    attributes |= {"out_features": out_features, "activation": activation}
    (out,) = _projection(editor, last, "Linear", x, optional, attributes)
    editor.replace(last, last.outputs[0], out)


def _projection(editor: _Editor, before: ir.Node, op: str, x: ir.Value, optional: dict, attributes: dict) -> list:
    names = [name for name in OPTIONAL_INPUTS if name in optional]
    operands = [x, optional["weight"], *(optional[name] for name in names)]
    attributes = {**attributes, "inputs": ",".join(names)}
    return editor.node(before, op, operands, attributes, DOMAIN, outputs=2 if op == "LinearTopK" else 1)


def _prologue(x: ir.Value, optional: dict[str, ir.Value]) -> tuple[ir.Value, float]:
    """Moves a choice of rows and a norm in front of a projection, in any order, into its inputs; returns x and the
    norm's epsilon."""
    if chosen := _chosen_rows(x):
        x, optional["rows"] = chosen
    norm, epsilon = x.producer(), 0.0
    if norm and norm.op_type == "RMSNormalization":
        x, optional["norm"] = _input(norm, 0), _input(norm, 1)
        epsilon = norm.attributes.get_float("epsilon", 1e-5)
    if "rows" not in optional and (chosen := _chosen_rows(x)):
        x, optional["rows"] = chosen
    return x, epsilon


def _chosen_rows(x: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The data [rows, features] and row numbers int32 [n] of which x [n, features] is made."""
    gather = x.producer()
    if not gather or gather.op_type != "Gather" or gather.attributes.get_int("axis", 0) != 0:
        return None
    data, rows = _input(gather, 0), _input(gather, 1)
    fits = _rank(data) == 2 and _rank(rows) == 1 and rows.dtype == ir.DataType.INT32
    return (data, rows) if fits and _constant(data) is None else None


def _renumbered(editor: _Editor, indices: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The value table[indices] int32 and its constant, one-dimensional table, if nothing else takes the indices."""
    unsqueeze = _only_user(indices, "Unsqueeze")
    gather = _only_user(unsqueeze.outputs[0], "GatherND") if unsqueeze else None
    cast = _only_user(gather.outputs[0], "Cast") if gather else None
    if not gather or not cast or cast.attributes["to"].value != ir.DataType.INT32:
        return None
    table = _constant(_input(gather, 0))
    if table is None or table.ndim != 1:
        return None
    return cast.outputs[0], editor.constant(f"{_input(gather, 0).name}.int32", table.astype(np.int32))


def _lower_embedding(editor: _Editor, node: ir.Node) -> None:
    table, ids = _input(node, 0), _input(node, 1)
    if _constant(table) is None or _rank(table) != 2 or table.dtype != ir.DataType.FLOAT:
        return
    if node.attributes.get_int("axis", 0) != 0:
        return
    rows, features = _shape(table)
    ids = editor.reshape(node, ids, [-1])
    if ids.dtype != ir.DataType.INT32:
        (ids,) = editor.node(node, "Cast", [ids], {"to": ir.DataType.INT32})
    operands = [ids, *editor.packed_weight(table, transposed=False).values()]
    attributes = {"in_features": features, "out_features": rows, "dtype": editor.precision}
    (out,) = editor.node(node, "Embedding", operands, attributes, DOMAIN)
    editor.replace(node, node.outputs[0], out)


def _lower_stack(editor: _Editor, node: ir.Node) -> None:
    """Rows side by side [B, L * K] that are taken one by one [B * L, K]."""
    reshape = _only_user(node.outputs[0], "Reshape")
    shapes = {_shape(_input(node, i))[1:] for i in range(len(node.inputs))}
    if not reshape or len(shapes) != 1 or _shape(reshape.outputs[0])[1:] != next(iter(shapes)):
        return
    if node.attributes.get_int("axis") % 2 == 1 and _rank(_input(node, 0)) == 2:
        (out,) = editor.node(reshape, "Stack", [_input(node, i) for i in range(len(node.inputs))], domain=DOMAIN)
        editor.replace(reshape, reshape.outputs[0], out)


def _lower_head_norms(node: ir.Node) -> None:
    """Norms of query and key heads, between the projections and an attention, become part of the attention."""
    norms = _head_norms(_input(node, 0))
    node.attributes["norm_eps"] = ir.AttrFloat32("norm_eps", norms[3] if norms else 0.0)
    if norms:
        qkv, query, key, _ = norms
        node.resize_inputs(len(node.inputs) + 2)
        for index, value in ((0, qkv), (-2, query), (-1, key)):
            node.replace_input_with(index % len(node.inputs), value)


def _head_norms(qkv: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value, float] | None:
    """The projections [T, fused], the norm weights of query and key heads, and their epsilon, where `qkv` is made of
    the projections' heads with norms and, as they are, the value heads."""
    reshape = qkv.producer()
    concat = _input(reshape, 0).producer() if reshape and reshape.op_type == "Reshape" else None
    if not concat or concat.op_type != "Concat" or len(concat.inputs) != 3:
        return None
    query, key = (_input(concat, i).producer() for i in range(2))
    split = _input(concat, 2).producer()
    if not query or not key or not split or split.op_type != "Split":
        return None
    if any(norm.op_type != "RMSNormalization" for norm in (query, key)):
        return None
    if [_input(query, 0), _input(key, 0), _input(concat, 2)] != list(split.outputs):
        return None
    heads = _input(split, 0).producer()
    epsilons = {norm.attributes.get_float("epsilon", 1e-5) for norm in (query, key)}
    if not heads or heads.op_type != "Reshape" or _rank(_input(heads, 0)) != 2 or len(epsilons) != 1:
        return None
    return _input(heads, 0), _input(query, 1), _input(key, 1), epsilons.pop()


def _fold_slice(editor: _Editor, node: ir.Node) -> None:
    """A part of a constant becomes a constant."""
    data, *ranges = (_constant(value) for value in node.inputs if value is not None)
    if data is None or len(ranges) != 4 or any(array is None for array in ranges):
        return
    cut = [slice(None)] * data.ndim
    for start, end, axis, step in np.stack(ranges, axis=1).tolist():  # type: ignore[arg-type]
        cut[axis] = slice(start, end, step)
    part = editor.constant(f"{_input(node, 0).name}.{node.outputs[0].name}", np.ascontiguousarray(data[tuple(cut)]))
    node.outputs[0].replace_all_uses_with(part)


def _lower_norm(editor: _Editor, node: ir.Node) -> None:
    attributes = {"eps": node.attributes.get_float("epsilon", 1e-5)}
    last, operands = node, [_input(node, 0), _input(node, 1)]
    if (add := _only_user(node.outputs[0], "Add")) and (other := _other_input(add, node)).shape == node.outputs[
        0
    ].shape:
        last, operands = add, [*operands, other]
    (out,) = editor.node(last, "RMSNorm", operands, attributes, DOMAIN)
    out.shape = last.outputs[0].shape
    editor.replace(last, last.outputs[0], out)


def _weight(node: ir.Node) -> tuple[ir.Value | None, bool]:
    """A multiplication's constant matrix, and whether it lies as [in, out] rather than [out, in]."""
    value, transposed = _input(node, 1), node.attributes.get_int("transB", 0) == 0
    producer = value.producer()
    if producer and producer.op_type == "Transpose":
        value, transposed = _input(producer, 0), not transposed
    scaled = any(node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta"))
    usable = _constant(value) is not None and _rank(value) == 2 and not node.attributes.get_int("transA", 0)
    return (value if usable and not scaled else None), transposed


def _gated(node: ir.Node) -> tuple[ir.Node, str] | None:
    """The last node of act(gate) * up, where gate and up are the halves of `node`'s output, and the activation."""
    split = _only_user(node.outputs[0], "Split")
    if not split or len(split.outputs) != 2 or _shape(split.outputs[0])[-1] != _shape(split.outputs[1])[-1]:
        return None
    gate, up = split.outputs
    silu, gelu = _silu(gate), _only_user(gate, "Gelu")
    if gelu and gelu.attributes.get_string("approximate", "none") != "tanh":
        return None
    activated = silu or gelu
    gated = _only_user(activated.outputs[0], "Mul") if activated else None
    return (gated, "swiglu" if silu else "geglu") if gated and up in gated.inputs else None


def _silu(x: ir.Value) -> ir.Node | None:
    """The last node of x * sigmoid(x), if nothing else takes x."""
    users = [use.node for use in x.uses()]
    sigmoid = next((node for node in users if node.op_type == "Sigmoid"), None)
    product = _only_user(sigmoid.outputs[0], "Mul") if sigmoid and not x.is_graph_output() else None
    return product if product and set(users) == {sigmoid, product} else None


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """The node that takes `value`, if it is the only one and of this type."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.op_type != op_type:
        return None
    return uses[0].node


def _other_input(node: ir.Node, producer: ir.Node) -> ir.Value:
    return next(value for value in node.inputs if value is not None and value is not producer.outputs[0])


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _constant(value: ir.Value) -> np.ndarray | None:
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def _shape(value: ir.Value) -> tuple[Any, ...]:
    return tuple(value.shape) if value.shape is not None else ()


def _rank(value: ir.Value, default: int = -1) -> int:
    return len(value.shape) if value.shape is not None else default
