"""Rewrites a network for TensorRT: its own collective operator and a sum instead of each `AllReduce`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from redraft.plugins.cuda.declaration import NAMESPACE

COLLECTIVE = "DistCollective"
DOMAIN = "tensorrt"
"""TensorRT's ONNX parser knows its operators only by their names."""

Attributes = dict[str, ir.TensorProtocol | int | str]


def tensorrt_form(network: ir.Model) -> ir.Model:
    """A copy of a network in which each `AllReduce` is an all-gather by `DistCollective`, whose parts are added in the
    order of ranks in float32 and rounded to the network's dtype once (see README.md)."""
    rewritten = network.clone()
    for node in list(rewritten.graph):
        if (node.domain, node.op_type) == (NAMESPACE, "AllReduce"):
            _rewrite(rewritten, node)
    return rewritten


def _rewrite(network: ir.Model, node: ir.Node) -> None:
    (x,), (out,), ranks = node.inputs, node.outputs, node.attributes["ranks"].as_int()
    assert x is not None
    assert x.dtype is not None
    assert x.shape is not None
    nodes: list[ir.Node] = []

    def add(kind: str, inputs: Sequence[ir.Value], dtype: ir.DataType, attributes: Attributes) -> ir.Value:
        domain = DOMAIN if kind == COLLECTIVE else ""
        nodes.append(ir.node(kind, inputs, attributes, domain=domain, name=f"{node.name}.{kind}.{len(nodes)}"))
        value = nodes[-1].outputs[0]
        value.name, value.type = f"{nodes[-1].name}.out", ir.TensorType(dtype)
        return value

    def constant(values: list[int] | int) -> ir.Value:
        return add("Constant", [], ir.DataType.INT64, {"value": ir.tensor(np.array(values, np.int64))})

    everyone: Attributes = {"collective_operation": "all_gather", "reduce_op": "none", "root": -1, "group_size": 0}
    gathered = add(COLLECTIVE, [x], x.dtype, {**everyone, "nb_rank": ranks})
    parts = add("Reshape", [gathered, constant([ranks, -1, *_known(x.shape[1:])])], x.dtype, {})
    parts = add("Cast", [parts], ir.DataType.FLOAT, {"to": ir.DataType.FLOAT})
    total: ir.Value | None = None
    for rank in range(ranks):
        part = add("Gather", [parts, constant(rank)], ir.DataType.FLOAT, {"axis": 0})
        total = part if total is None else add("Add", [total, part], ir.DataType.FLOAT, {})
    assert total is not None
    rounded = add("Cast", [total], x.dtype, {"to": x.dtype})
    for new in nodes:
        network.graph.insert_before(node, new)
    network.opset_imports[DOMAIN] = 1
    name, rounded.shape = out.name, out.shape
    out.replace_all_uses_with(rounded, replace_graph_outputs=True)
    out.name, rounded.name = None, name
    network.graph.remove(node, safe=True)


def _known(sizes: Sequence[int | ir.SymbolicDim]) -> list[int]:
    assert all(isinstance(size, int) for size in sizes)
    return [int(size) for size in sizes]  # type: ignore[arg-type]
