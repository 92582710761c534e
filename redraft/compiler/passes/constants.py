"""The constants of an exported program's module: their names, their values, and the removal of those that nothing
reads."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import fx


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


def remove_unread(module: fx.GraphModule) -> None:
    """Remove the constants that no node reads: exporting would keep them."""
    read = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    parameters, buffers = (f(remove_duplicate=False) for f in (module.named_parameters, module.named_buffers))
    for name in [*(name for name, _ in parameters), *(name for name, _ in buffers)]:
        if name not in read:
            owner, _, attribute = name.rpartition(".")
            delattr(module.get_submodule(owner), attribute)
