"""Rewrites a plugin-form network for the CPU engine: multiplications with constant weights become
`redraft.cpu` operators with packed weights, together with the norm, bias, SwiGLU and residual around them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from plugins.linear.pack import PackedWeight, pack

DOMAIN = "redraft.cpu"


def lower(model: ir.Model, precision: str) -> ir.Model:
    """A copy of a plugin-form network whose heavy operators are those of plugins/.

    `precision` fp32, bf16 or int8 is how weights are stored; activations stay float32. The packed weights
    replace the originals, once each where several operators share one. Raises ValueError for an unknown precision.
    """
    lowered = model.clone()
    lowered.opset_imports[DOMAIN] = 1
    builder = _Builder(lowered.graph, precision)
    for node in list(lowered.graph):
        if node.op_type in ("MatMul", "Gemm"):
            _lower_projection(builder, node)
        elif node.op_type == "Gather":
            _lower_embedding(builder, node)
    RemoveUnusedNodesPass()(lowered)
    for node in list(lowered.graph):
        if node.op_type == "RMSNormalization":
            _lower_norm(builder, node)
    RemoveUnusedNodesPass()(lowered)
    return lowered


@dataclass
class _Builder:
    graph: ir.Graph
    precision: str
    packed: dict[tuple[str, str], list[ir.Value]] = field(default_factory=dict)

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.shape, value.dtype = ir.Shape(array.shape), value.const_value.dtype  # type: ignore[union-attr]
        self.graph.register_initializer(value)
        return value

    def packed_weight(self, weight: ir.Value, transposed: bool, activation: str = "none") -> list[ir.Value]:
        """The packed weight and, for int8, its scale."""
        key = (f"{weight.name}{'.T' if transposed else ''}", activation)
        if key not in self.packed:
            matrix = _array(weight)
            packed: PackedWeight = pack(matrix.T if transposed else matrix, self.precision, activation)
            name = f"{key[0]}.{self.precision}{'' if activation == 'none' else '.' + activation}"
            self.packed[key] = [self.constant(name, packed.data)]
            if packed.scale is not None:
                self.packed[key].append(self.constant(f"{name}.scale", packed.scale))
        return self.packed[key]

    def node(
        self, before: ir.Node, op: str, inputs: list[ir.Value], outputs: int = 1, domain: str = "", **attrs
    ) -> list[ir.Value]:
        node = ir.node(op, inputs, attributes=attrs, domain=domain, num_outputs=outputs, name=f"{before.name}.{op}")
        for i, output in enumerate(node.outputs):
            output.name = f"{node.name}.{i}"
        self.graph.insert_before(before, node)
        return list(node.outputs)

    def flat(self, before: ir.Node, x: ir.Value, width: int | None) -> ir.Value:
        """x [..., width] as [rows, width], or with no width x [...] as [rows]."""
        rank = len(x.shape) if x.shape is not None else None
        if rank == (1 if width is None else 2):
            return x
        shape = [-1] if width is None else [-1, width]
        return self.node(before, "Reshape", [x, self.shape_constant(shape)])[0]

    def unflat(self, before: ir.Node, value: ir.Value, like: ir.Value) -> ir.Value:
        """The inverse of `flat`, for an output that replaces `like`."""
        if like.shape is None or len(like.shape) == 2:
            return value
        dynamic = [d for d in like.shape if not isinstance(d, int)]
        if len(dynamic) > 1:
            raise ValueError(f"{like.name} has shape {like.shape}: expected one variable dimension at most")
        shape = [d if isinstance(d, int) else -1 for d in like.shape]
        return self.node(before, "Reshape", [value, self.shape_constant(shape)])[0]

    def shape_constant(self, shape: list[int]) -> ir.Value:
        name = "shape." + "x".join(map(str, shape))
        return self.graph.initializers.get(name) or self.constant(name, np.array(shape, dtype=np.int64))

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        new.shape, new.dtype, name = old.shape, old.dtype, old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = f"{name}.replaced", name


def _lower_projection(builder: _Builder, node: ir.Node) -> None:
    weight, rows_are_outputs = _weight(node)
    if weight is None:
        return
    matrix_shape = weight.shape.numpy()  # type: ignore[union-attr]
    out_features, in_features = matrix_shape if rows_are_outputs else matrix_shape[::-1]
    inputs: dict[str, ir.Value] = {}
    last, out = node, node.outputs[0]
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        inputs["bias"] = node.inputs[2]
    elif (add := _only_user(out, "Add")) and _array_or_none(bias := _other(add, out)) is not None:
        if bias.shape.numpy() == (out_features,):  # type: ignore[union-attr]
            inputs["bias"], last, out = bias, add, add.outputs[0]

    activation = "none"
    if (gated := _swiglu_of(out)) is not None:
        activation, last, out, out_features = "swiglu", gated, gated.outputs[0], out_features // 2
    elif (log_softmax := _only_user(out, "LogSoftmax")) and (topk := _only_user(log_softmax.outputs[0], "TopK")):
        _lower_topk(builder, node, topk, weight, not rows_are_outputs, inputs)
        return
    if (add := _only_user(out, "Add")) and add is not last:
        other = _other(add, out)
        if _array_or_none(other) is None and other.shape == out.shape and len(add.outputs[0].shape or ()) == 2:
            inputs["residual"], last, out = other, add, add.outputs[0]

    x = _fuse_rows_and_norm(node.inputs[0], inputs)  # type: ignore[arg-type]
    norm_eps = inputs.pop("norm_eps", None)
    packed = builder.packed_weight(weight, not rows_are_outputs, activation)
    operands, names = _operands(packed, inputs)
    (new,) = builder.node(
        last,
        "Linear",
        [builder.flat(last, x, in_features), packed[0], *operands],
        domain=DOMAIN,
        in_features=in_features,
        out_features=out_features,
        dtype=builder.precision,
        norm_eps=norm_eps if norm_eps is not None else 0.0,
        activation=activation,
        inputs=names,
    )
    builder.replace(out, builder.unflat(last, new, out))
