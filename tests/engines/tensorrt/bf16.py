"""bf16 networks for ONNX Runtime, which has no kernels of that type for CPUs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

BF16, FLOAT = ir.DataType.BFLOAT16, ir.DataType.FLOAT


def in_float32(network: ir.Model) -> ir.Model:
    """The network, changed to compute in float32 and to round to bf16 what every operator gives: as a GPU does, which
    sums in float32 too."""
    graph = network.graph
    for value in (*graph.inputs, *graph.initializers.values()):
        _widen(value)
    for node in list(graph):
        for name, attribute in node.attributes.items():
            assert attribute.type != ir.AttributeType.GRAPH
            if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == BF16:
                node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.value.numpy().astype(np.float32)))
        for value in list(node.outputs):
            assert value.dtype is not None, value
            if value.dtype == BF16:
                _round(graph, node, value)
        if node.op_type == "Cast" and node.attributes["to"].value == BF16:
            node.attributes["to"] = ir.AttrInt64("to", FLOAT)
    return network


def _widen(value: ir.Value) -> None:
    if value.dtype == BF16:
        value.dtype = FLOAT
        if value.const_value is not None:
            value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)


def _round(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Put the rounded value in a value's place."""
    _widen(value)
    name, value.name = value.name, f"{value.name} unrounded"
    narrow = ir.node("Cast", [value], {"to": BF16}, name=f"{name} to bf16")
    wide = ir.node("Cast", [narrow.outputs[0]], {"to": FLOAT}, name=f"{name} back")
    wide.outputs[0].name, wide.outputs[0].type, wide.outputs[0].shape = name, value.type, value.shape
    ir.convenience.replace_all_uses_with(value, wide.outputs[0], replace_graph_outputs=True)
    narrow.replace_input_with(0, value)
    graph.insert_after(node, [narrow, wide])
