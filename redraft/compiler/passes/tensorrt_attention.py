"""Rewrites a plugin-form network for TensorRT: the plugins of kernel.cu instead of each `TreeAttention`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from redraft.plugins.cuda.declaration import ALIAS, NAMESPACE, Kernel
from redraft.plugins.operators.tree_attention.cuda_kernels import COMBINE, HEAD_SIZES, SPLIT, WRITE, eps_bits

DTYPES = {"bf16": ir.DataType.BFLOAT16, "int32": ir.DataType.INT32, "float32": ir.DataType.FLOAT}
INPUTS = [argument.name for argument in WRITE.inputs]
CACHES = ("k_cache", "v_cache")
NORMS = ("q_norm", "k_norm")
OPERATOR = (*[name for name in INPUTS if name not in ("starts", *NORMS, *CACHES)], *CACHES)
"""Where `TreeAttention` has these inputs of its kernels; its tree_mask is the sixth, its starts and norms the last."""


def tensorrt_form(network: ir.Model, alias: bool = False) -> ir.Model:
    """A copy of a network in which each `TreeAttention` is commit and write, split, and combine.

    The network is `export_target_plugin`'s of a bf16 module, with bf16 caches and aliased outputs. The partial results
    are tensors between the plugins; `starts` is the node's own or, without it, cache_lengths. The updated caches are
    outputs of `TreeAttentionWrite`, which with `alias` declares them as its updated inputs: see
    `quick_plugin.register`. Raises ValueError for other head sizes and dtypes than the kernels'.
    """
    rewritten = network.clone()
    for node in list(rewritten.graph):
        if (node.domain, node.op_type) == (NAMESPACE, "TreeAttention"):
            _rewrite(rewritten.graph, node, alias)
    RemoveUnusedNodesPass()(rewritten)
    return rewritten


def _rewrite(graph: ir.Graph, node: ir.Node, alias: bool) -> None:
    names = [*OPERATOR[:5], "tree_mask", *OPERATOR[5:]]
    last = {1: ["starts"], 2: [*NORMS], 3: ["starts", *NORMS]}.get(len(node.inputs) - len(names), [])
    inputs = dict(zip([*names, *last], node.inputs, strict=True))
    inputs.setdefault("starts", inputs["cache_lengths"])
    sizes = {name: node.attributes[f"num_{name}"].as_int() for name in ("heads", "kv_heads")}
    sizes["head_size"] = node.attributes["head_size"].as_int()
    if sizes["head_size"] not in HEAD_SIZES:
        raise ValueError(f"head size {sizes['head_size']}: TensorRT's plugins take {', '.join(map(str, HEAD_SIZES))}")
    norm_eps = eps_bits(node.attributes.get_float("norm_eps", 0.0))
    if NORMS[0] in inputs:
        inputs |= {name: _in_float32(graph, inputs[name]) for name in NORMS}
    else:
        inputs |= dict.fromkeys(NORMS, _unread_norm(graph, sizes["head_size"]))
        norm_eps = 0
    written = sizes | {"norm_eps": norm_eps, ALIAS: int(alias)}
    q, k, v = _plugin(graph, node, WRITE, [inputs[name] for name in INPUTS], written)
    inputs |= {"q": q, "k_cache": k, "v_cache": v}
    window = {"window": node.attributes.get_int("window", 0)}
    parts = _plugin(graph, node, SPLIT, [inputs[argument.name] for argument in SPLIT.inputs], sizes | window)
    (out,) = _plugin(graph, node, COMBINE, [*parts, inputs["row_offsets"]], sizes)
    for old, new in zip(node.outputs, (out, k, v), strict=False):
        name, new.shape, new.type = old.name, old.shape, old.type
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = None, name
    graph.remove(node, safe=True)


def _unread_norm(graph: ir.Graph, size: int) -> ir.Value:
    """What `TreeAttentionWrite` takes for weights of norms that a layer does not have."""
    name = f"unread_norm.{size}"
    if name not in graph.initializers:
        ones = ir.tensor([1.0] * size, dtype=ir.DataType.FLOAT, name=name)
        graph.register_initializer(ir.val(name, const_value=ones))
    return graph.initializers[name]


def _in_float32(graph: ir.Graph, norm: ir.Value | None) -> ir.Value:
    """A norm's constant weights in the dtype that `TreeAttentionWrite` takes."""
    assert norm is not None
    assert norm.const_value is not None
    name = f"{norm.name}.float32"
    if name not in graph.initializers:
        widened = ir.tensor(norm.const_value.numpy().astype(np.float32), name=name)
        graph.register_initializer(ir.val(name, const_value=widened))
    return graph.initializers[name]


def _plugin(
    graph: ir.Graph, before: ir.Node, kernel: Kernel, inputs: Sequence[ir.Value | None], sizes: dict[str, int]
) -> Sequence[ir.Value]:
    """A plugin's node, as TensorRT's ONNX parser finds it in the registry."""
    for argument, value in zip(kernel.inputs, inputs, strict=True):
        if value is None or value.dtype != DTYPES[argument.dtype]:
            dtype = None if value is None else value.dtype
            raise ValueError(f"{before.name}: {argument.name} is {dtype}: {kernel.name} takes {argument.dtype}")
    attributes: dict[str, int | str] = {**sizes, "plugin_namespace": NAMESPACE, "plugin_version": "1", "aot": 1}
    node = ir.node(
        kernel.name,
        inputs,
        attributes,
        domain=NAMESPACE,
        num_outputs=len(kernel.outputs),
        name=f"{before.name}.{kernel.name}",
    )
    for output, value in zip(kernel.outputs, node.outputs, strict=True):
        value.name = f"{node.name}.{output.name}"
        value.type = ir.TensorType(DTYPES[output.dtype])
    graph.insert_before(before, node)
    return node.outputs
