"""`torch` programs with fewer kernels: `AddNorm` for the residual stream's sums, `SiluProduct` for an MLP's gate,
`TopLogProbs` for a drafter's head, and constants in the dtype that kernels read.

The pass works on the module of an exported program, which is then exported again. Results on the CPU are the same bit
for bit, except the order of equal log-probabilities.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import redraft.plugins.operators.add_norm.torch_op
import redraft.plugins.operators.silu_product.torch_op
import redraft.plugins.operators.top_log_probs.torch_op
import redraft.plugins.operators.tree_attention.torch_op  # noqa: F401 (they register the operators)
from redraft.compiler.passes.constants import remove_unread, value_of
from redraft.plugins.operators.add_norm.cuda import STEP as NORM_STEP
from redraft.plugins.operators.silu_product.cuda import STEP as GATE_STEP
from redraft.plugins.operators.top_log_probs.cuda import MOST as MOST_TOKENS

aten, ours = torch.ops.aten, torch.ops.redraft
HEAD_NORMS = slice(16, 18)
"""The arguments of attention that are norms of heads"""


def fuse(module: fx.GraphModule) -> fx.GraphModule:
    """Put the operators in place of what they compute, where it is in bf16 and of sizes that the kernels take."""
    for node in list(module.graph.nodes):
        if node.target is aten.rms_norm.default:
            _fuse_norm(module.graph, node)
        elif node.target is aten.silu.default:
            _fuse_gate(module.graph, node)
        elif node.target is aten.topk.default:
            _fuse_head(module, node)
        elif node.target is ours.tree_attention.default:
            _widen_head_norms(module, node)
    module.graph.eliminate_dead_code()
    remove_unread(module)
    module.recompile()
    return module


def _fuse_norm(graph: fx.Graph, norm: fx.Node) -> None:
    arguments: tuple[Any, ...] = norm.args
    total, _, weight, *eps = arguments
    if not (_is_call(total, aten.add.Tensor) and _is_constant(weight) and eps):
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


def _fuse_head(module: fx.GraphModule, topk: fx.Node) -> None:
    """`log_softmax` in float32 of rows in bf16, its largest values, and the tokens of their columns."""
    arguments: tuple[Any, ...] = topk.args
    scores, k, *dim = arguments
    if topk.kwargs or dim not in ([], [-1]) or not _is_call(scores, aten.log_softmax.int):
        return
    wide, *last = scores.args
    if last != [-1] or not _is_call(wide, aten.to.dtype) or wide.args[1:] != (torch.float32,):
        return
    logits = wide.args[0]
    if not _fits(logits, 1) or logits.meta["val"].ndim != 2 or k > MOST_TOKENS:
        return
    results: dict[Any, fx.Node] = {user.args[1]: user for user in topk.users}
    lookup: Any = _only_user(results.get(1))
    if not _is_call(lookup, aten.index.Tensor) or lookup.args[1] != [results[1]]:
        return
    ids = lookup.args[0]
    if not _is_constant(ids):
        return
    tokens: Any = lookup if value_of(module, ids).dtype == torch.int32 else _only_user(lookup)
    if tokens is not lookup and not (_is_call(tokens, aten.to.dtype) and tokens.args[1:] == (torch.int32,)):
        return
    graph = module.graph
    for check in _checks(lookup):  # they would keep what is replaced
        graph.erase_node(check)
    with graph.inserting_before(topk):
        both = graph.call_function(ours.top_log_probs.default, (logits, _in_dtype(module, ids, torch.int32), k))
        new = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
    for old, result in ((results.get(0), new[0]), (tokens, new[1])):
        if old is not None:
            old.replace_all_uses_with(result)


def _widen_head_norms(module: fx.GraphModule, attention: fx.Node) -> None:
    """Attention's kernels read norms of heads in float32, and would have them cast in every step."""
    arguments: list[Any] = list(attention.args)
    with module.graph.inserting_before(attention):
        for i, norm in enumerate(arguments[HEAD_NORMS], HEAD_NORMS.start):
            if _is_constant(norm):
                arguments[i] = _in_dtype(module, norm, torch.float32)
    attention.args = tuple(arguments)


def _in_dtype(module: fx.GraphModule, constant: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A node of the constant in this dtype, which is stored so once."""
    name = f"{constant.target}.{dtype}".replace(".", "_")
    if not hasattr(module, name):
        module.register_buffer(name, value_of(module, constant).to(dtype))
    return module.graph.get_attr(name)


def _only_user(node: fx.Node | None) -> fx.Node | None:
    """The one node that reads a node's result; None where others do."""
    readers = [user for user in node.users if user not in _checks(node)] if node else []
    return readers[0] if len(readers) == 1 else None


def _checks(node: fx.Node) -> list[fx.Node]:
    """The checks of a node's dtype, which exporting leaves beside a cast."""
    return [user for user in node.users if user.target is aten._assert_tensor_metadata.default]


def _is_constant(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr"


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
