"""`torch` programs in FP8: products of rows with constants become nodes of `Fp8Linear`, or of `Fp8Product` where the
operator before gives its rows in E4M3.

The pass works on the module of an exported program, which is then exported again. So it finds the products of every
model and drafter, and products with a slice of a constant too.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import redraft.plugins.operators.add_norm.torch_op
import redraft.plugins.operators.silu_product.torch_op  # noqa: F401 (they register the operators)
from redraft.compiler.passes.constants import constant_name, key_of, remove_unread, value_of
from redraft.plugins.operators.fp8_linear.reference import STEP, quantize_rows
from redraft.plugins.operators.fp8_linear.torch_op import fp8_linear, fp8_product

SPARED = "router.weight"
"""The suffix of the names of constants that keep their dtype in every model: they choose a row's experts"""

ours = torch.ops.redraft


class PaddedMatrix(NamedTuple):
    """A matrix of the rewritten module: the names of its constants, and its rows before they were padded."""

    weight: str
    scale: str
    rows: int


def quantize(module: fx.GraphModule, scales: Mapping[str, Tensor | None] | None = None) -> fx.GraphModule:
    """Store an exported program's matrices in E4M3, in place. `scales` float32 [N] has the scales of the constants that
    their source stores in E4M3, by name, and None for those that stay as they are; every row of the others gets its
    own."""
    with torch.no_grad():
        return _Rewriting(module, scales or {}).module


def product(rows: tuple[Tensor, ...], weight: Tensor, scale: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """The first `count` features of `Fp8Linear` for rows (x [..., K],) or of `Fp8Product` for (codes, scales). `weight`
    and `scale` are padded; x and bias [count] are not."""
    if bias is not None and count < len(weight):
        bias = F.pad(bias, (0, len(weight) - count))
    if len(rows) == 1:
        (x,) = rows
        missing = weight.shape[1] - x.shape[-1]
        out = fp8_linear(F.pad(x, (0, missing)) if missing else x, weight, scale, bias)
    else:
        out = fp8_product(*rows, weight, scale, bias)
    return out if count == len(weight) else out[..., :count]


class _Rewriting:
    """A module whose products are replaced one by one."""

    def __init__(self, module: fx.GraphModule, scales: Mapping[str, Tensor | None]):
        self.module, self._scales = module, scales
        self._stored: dict[Hashable, PaddedMatrix] = {}
        self._rows: dict[fx.Node, tuple[fx.Node, ...]] = {}
        spared = {name for name, scale in scales.items() if scale is None}
        products = {node: name for node in module.graph.nodes if (name := _matrix_of(node))}
        self._products = {node: name for node, name in products.items() if name not in spared}
        for node, name in self._products.items():
            self._replace(node, name)
        module.graph.eliminate_dead_code()
        remove_unread(module)
        module.recompile()

    def _replace(self, node: fx.Node, name: str) -> None:
        arguments: tuple[Any, ...] = node.args
        x, weight, *bias = arguments
        graph, key = self.module.graph, key_of(weight)
        if key not in self._stored:
            self._stored[key] = self._store(value_of(self.module, weight), self._scales.get(name))
        if x not in self._rows:
            self._rows[x] = self._quantized(x) or (x,)
        stored = self._stored[key]
        with graph.inserting_before(node):
            constants = [graph.get_attr(stored.weight), graph.get_attr(stored.scale)]
            new = graph.call_function(product, (self._rows[x], *constants, bias[0] if bias else None, stored.rows))
        new.meta = dict(node.meta)  # the next product looks at it
        node.replace_all_uses_with(new)
        graph.erase_node(node)

    def _quantized(self, x: fx.Node) -> tuple[fx.Node, ...] | None:
        """Codes and scales of rows that nothing but products take, from the operator that gives them."""
        graph = self.module.graph
        if not all(user in self._products for user in x.users) or x.meta["val"].shape[-1] % STEP:
            return None
        if x.target is ours.silu_product.default:
            return self._results(x, ours.silu_product_quantized.default, 2)
        if x.target is not operator.getitem or x.args[1] != 1:
            return None
        both: Any = x.args[0]
        if both.target is not ours.add_norm.default:
            return None
        total, *rows = self._results(both, ours.add_norm_quantized.default, 3)
        for result in [user for user in both.users if user.args[1] == 0]:
            result.replace_all_uses_with(total)
            graph.erase_node(result)
        return tuple(rows)

    def _results(self, node: fx.Node, function: Any, count: int) -> tuple[fx.Node, ...]:
        """The results of an operator that takes what a node takes."""
        graph = self.module.graph
        with graph.inserting_before(node):
            results = graph.call_function(function, node.args)
            return tuple(graph.call_function(operator.getitem, (results, i)) for i in range(count))

    def _store(self, weight: Tensor, scale: Tensor | None) -> PaddedMatrix:
        codes, scale = quantize_rows(weight, scale)
        (rows, features), count = weight.shape, len(self._stored)
        more = -rows % STEP
        padded = codes.view(torch.uint8)
        padded = F.pad(padded, (0, -features % STEP, 0, more)).view(codes.dtype)
        stored = PaddedMatrix(f"fp8_weight_{count}", f"fp8_scale_{count}", rows)
        self.module.register_buffer(stored.weight, padded)
        self.module.register_buffer(stored.scale, F.pad(scale, (0, more), value=1.0))
        return stored


def _matrix_of(node: fx.Node) -> str | None:
    """The name of the constant that a product of rows takes; None for others."""
    if node.target is not torch.ops.aten.linear.default:
        return None
    name = constant_name(node.args[1])
    return None if name is None or name.endswith(SPARED) else name
