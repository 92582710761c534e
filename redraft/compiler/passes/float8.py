"""`torch` programs in FP8: products of rows with constants become nodes of `Fp8Linear`.

The pass works on the module of an exported program, which is then exported again. So it takes products of every model
and drafter, also those with a part of a constant.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from redraft.plugins.operators.fp8_linear.reference import STEP, quantize_rows
from redraft.plugins.operators.fp8_linear.torch_op import fp8_linear

SPARED = "router.weight"
"""How the names of constants end that keep their dtype: they choose a row's experts"""


class PaddedMatrix(NamedTuple):
    """A matrix of the rewritten module: the names of its constants, and its rows before they were padded."""

    weight: str
    scale: str
    rows: int


def quantize(module: fx.GraphModule, scales: Mapping[str, Tensor] | None = None) -> fx.GraphModule:
    """Store an exported program's matrices in E4M3, in place. `scales` float32 [N] are those of constants whose source
    stores them so, by name; other rows get their own."""
    with torch.no_grad():
        return _Rewriting(module, scales or {}).module


def product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """`Fp8Linear` for any sizes: `weight` and `scale` are padded, x [..., K] and bias [rows] are not."""
    missing = weight.shape[1] - x.shape[-1]
    if missing:
        x = F.pad(x, (0, missing))
    if rows == weight.shape[0]:
        return fp8_linear(x, weight, scale, bias)
    if bias is not None:
        bias = F.pad(bias, (0, weight.shape[0] - rows))
    return fp8_linear(x, weight, scale, bias)[..., :rows]


class _Rewriting:
    """A module whose products are replaced one by one."""

    def __init__(self, module: fx.GraphModule, scales: Mapping[str, Tensor]):
        self.module, self._scales = module, scales
        self._stored: dict[Hashable, PaddedMatrix] = {}
        products = [node for node in module.graph.nodes if node.target is torch.ops.aten.linear.default]
        for node in products:
            x, weight, *rest = node.args
            if (name := constant_name(weight)) and not name.endswith(SPARED):
                self._replace(node, x, weight, rest[0] if rest else None, name)
        module.graph.eliminate_dead_code()
        self._remove_unread()
        module.recompile()

    def _replace(self, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, name: str) -> None:
        graph, key = self.module.graph, key_of(weight)
        if key not in self._stored:
            self._stored[key] = self._store(value_of(self.module, weight), self._scales.get(name))
        stored = self._stored[key]
        with graph.inserting_before(node):
            constants = [graph.get_attr(stored.weight), graph.get_attr(stored.scale)]
            new = graph.call_function(product, (x, *constants, bias, stored.rows))
        node.replace_all_uses_with(new)
        graph.erase_node(node)

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

    def _remove_unread(self) -> None:
        """Remove the constants that no node reads any more: exporting would keep them."""
        read = {node.target for node in self.module.graph.nodes if node.op == "get_attr"}
        module = self.module
        parameters, buffers = (f(remove_duplicate=False) for f in (module.named_parameters, module.named_buffers))
        for name in [*(name for name, _ in parameters), *(name for name, _ in buffers)]:
            if name not in read:
                owner, _, attribute = name.rpartition(".")
                delattr(self.module.get_submodule(owner), attribute)


def constant_name(value: Any) -> str | None:
    """The name of the constant that a value is, or is made of by operators that take nothing else; None for others."""
    if not isinstance(value, fx.Node):
        return None
    if value.op == "get_attr":
        return str(value.target)
    if value.op != "call_function" or len(value.all_input_nodes) != 1:
        return None
    return constant_name(value.all_input_nodes[0])


def key_of(value: Any) -> Hashable:
    """Equal for values that the same operators make of the same constants."""
    if isinstance(value, fx.Node):
        if value.op == "get_attr":
            return value.target
        return value.target, key_of(value.args), key_of(tuple(value.kwargs.items()))
    return tuple(map(key_of, value)) if isinstance(value, list | tuple) else value


def value_of(module: fx.GraphModule, value: Any) -> Any:
    """What a constant's node gives."""
    if not isinstance(value, fx.Node):
        return value
    if value.op == "get_attr":
        owner, _, attribute = str(value.target).rpartition(".")
        return getattr(module.get_submodule(owner), attribute)
    args = fx.map_arg(value.args, lambda node: value_of(module, node))
    kwargs = fx.map_arg(value.kwargs, lambda node: value_of(module, node))
    return value.target(*args, **kwargs)  # type: ignore[operator]
