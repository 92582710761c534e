"""Networks: ONNX graphs of the target and of drafting loops, from the torch modules that train and test them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from redraft.model_defs.target.attention import HeadNorms

if TYPE_CHECKING:
    import onnx_ir as ir

OPSET = 24


def cache_names(layers: int, suffix: str = "") -> list[str]:
    """What networks call the caches of so many layers."""
    return [f"{kind}_cache.{layer}{suffix}" for kind in "kv" for layer in range(layers)]


def attention_attributes(
    num_heads: int, num_kv_heads: int, head_size: int, window: int | None, norms: HeadNorms | None
) -> dict[str, Any]:
    """The attributes of a `TreeAttention` node; a window of 0 is none."""
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
    return sizes | {"window": window or 0, "norm_eps": norms.eps if norms else 0.0}


def export_network(
    module: nn.Module, args: tuple, shapes: tuple, inputs: Sequence[str], outputs: Sequence[str]
) -> ir.Model:
    """A module with these inputs as a network; `shapes` name the axes whose sizes are left open."""
    for exporter in ("torch.onnx", "onnxscript"):
        logging.getLogger(exporter).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module.eval(),
            args,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=shapes,
            input_names=inputs,
            output_names=outputs,
            verbose=False,
        )
    assert program is not None
    return program.model
