"""`torch` programs with fewer kernels: `AddNorm` for the residual stream's sums, `SiluProduct` for an MLP's gate.

The pass works on the module of an exported program, which is then exported again. Results on the CPU are the same bit
for bit.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import redraft.plugins.operators.add_norm.torch_op
import redraft.plugins.operators.silu_product.torch_op  # noqa: F401 (they register the operators)
from redraft.plugins.operators.add_norm.cuda import STEP as NORM_STEP
from redraft.plugins.operators.silu_product.cuda import STEP as GATE_STEP

aten, ours = torch.ops.aten, torch.ops.redraft


def fuse(module: fx.GraphModule) -> fx.GraphModule:
    """Put the operators in place of what they compute, where it is in bf16 and of sizes that the kernels take."""
    for node in list(module.graph.nodes):
        if node.target is aten.rms_norm.default:
            _fuse_norm(module.graph, node)
        elif node.target is aten.silu.default:
            _fuse_gate(module.graph, node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _fuse_norm(graph: fx.Graph, norm: fx.Node) -> None:
    arguments: tuple[Any, ...] = norm.args
    total, _, weight, *eps = arguments
    if not (_is_call(total, aten.add.Tensor) and isinstance(weight, fx.Node) and weight.op == "get_attr" and eps):
        return
    x, part = total.args[:2]
    if total.kwargs or not _fits(total, NORM_STEP) or not _alike(x, part) or not _alike(x, total):
        return
    with graph.inserting_before(total):
        both = graph.call_function(ours.add_norm.default, (x, part, graph.get_attr(str(weight.target)), eps[0]))
        results = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
    for old, new in ((norm, results[1]), (total, results[0])):
        new.meta = dict(old.meta)  # the next norm looks at it
        old.replace_all_uses_with(new)
        graph.erase_node(old)


def _fuse_gate(graph: fx.Graph, silu: fx.Node) -> None:
    gate: Any = silu.args[0]
    users: list[Any] = list(silu.users)
    if len(users) != 1 or not _is_call(users[0], aten.mul.Tensor) or not _is_call(gate, operator.getitem):
        return
    (product,) = users
    up: Any = next((other for other in product.args if other is not silu), None)
    halves, first = gate.args
    if not (_is_call(up, operator.getitem) and up.args == (halves, 1) and first == 0):
        return
    if not _is_call(halves, aten.chunk.default) or halves.args[1:] != (2, -1) or not _fits(product, GATE_STEP):
        return
    with graph.inserting_before(product):
        new = graph.call_function(ours.silu_product.default, (halves.args[0],))
    new.meta = dict(product.meta)
    product.replace_all_uses_with(new)
    graph.erase_node(product)


def _is_call(value: Any, target: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is target


def _fits(node: fx.Node, step: int) -> bool:
    """Whether the kernels take a node's result."""
    value = node.meta["val"]
    return value.dtype == torch.bfloat16 and value.shape[-1] % step == 0


def _alike(a: Any, b: Any) -> bool:
    """Whether two nodes' results have one shape and dtype."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return False
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.dtype == y.dtype
