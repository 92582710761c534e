"""The strongly typed plugin form for TensorRT, run by the kernels' own code."""

from __future__ import annotations

import dataclasses
from functools import partial

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from redraft.compiler.calibration import calibrate
from redraft.compiler.passes.quantization import quantize_network
from redraft.compiler.passes.tensorrt_attention import tensorrt_form
from redraft.model_defs.export.target import CacheShape, export_target_plugin
from redraft.model_defs.target.model import Target
from redraft.plugins.operators.tree_attention.cuda_kernels import KERNELS, SPLIT, WRITE
from tests.compiler.passes.test_quantization import fake_quantized
from tests.engines.tensorrt.stand_in_tensorrt import plugin
from tests.engines.tiny import VOCAB, chain, expected, make_batch, random_model, random_tree, tiny_lm, tiny_target

CACHE = CacheShape(4, 40, 8)


def normed_lm(float32_norms: bool = False) -> Target:
    return random_model(dataclasses.replace(tiny_lm().config, qk_norm=True, float32_norms=float32_norms))


TEXTS = [[5, 9, 2, 77, 31], [1, 110, 3], list(range(20, 45))]
TOLERANCES = {"bf16": (0.06, 0.01), "int8": (0.1, 0.02), "int4": (0.5, 0.1), "fp8": (0.5, 0.1)}
"""Largest and mean square error, as a share of the largest number. Between two numbers
of int4 or float8 either may be taken."""


def typed(target: Target) -> ir.Model:
    """The target's plugin form in bf16."""
    return export_target_plugin(
        target.in_dtype(torch.bfloat16), CACHE, cache_dtype=torch.bfloat16, aliased_outputs=True
    )


def test_keys_are_read_from_what_the_write_returns():
    """Else TensorRT could read before it writes."""
    for node in tensorrt_form(typed(tiny_lm())).graph:
        if node.op_type == SPLIT.name:
            caches = [value for value, a in zip(node.inputs, SPLIT.inputs, strict=True) if a.name.endswith("_cache")]
            assert [value.producer().op_type for value in caches] == [WRITE.name] * 2


@pytest.mark.parametrize(
    ("precision", "of"),
    [*((name, tiny_lm) for name in TOLERANCES), ("bf16", normed_lm), ("bf16", partial(normed_lm, True))],
)
def test_the_file_computes_what_the_module_does(precision, of):
    """Quantized, what a module with weights and inputs rounded in the same way does."""
    target, network = of(), tensorrt_form(typed(of()))
    if precision != "bf16":
        largest = calibrate(target, "", TEXTS).largest_inputs
        network = tensorrt_form(quantize_network(typed(tiny_lm()), precision, largest))
        target = fake_quantized(target, precision, largest)
    evaluator = ReferenceEvaluator(ir.to_proto(network), new_ops=[plugin(kernel) for kernel in KERNELS])
    rng, (most, usual) = np.random.default_rng(0), TOLERANCES[precision]
    shape = (CACHE.slots, target.config.num_kv_heads, CACHE.rows, target.config.head_size)
    caches = {
        f"{kind}_cache.{layer}": np.zeros(shape, ml_dtypes.bfloat16)
        for kind in "kv"
        for layer in range(target.config.num_layers)
    }
    contexts = {slot: rng.integers(0, VOCAB, n).tolist() for slot, n in ((2, 11), (0, 4))}
    prefill = [chain(slot, [], tokens, causal=True) for slot, tokens in contexts.items()]
    first = random_tree(rng, 2, contexts[2], 8)
    path = first.ancestors(7)[::-1]
    second = random_tree(rng, 2, contexts[2] + [first.tokens[row] for row in path], 5)
    second.commit = path
    for step in (prefill, [chain(0, contexts[0], [7]), first], [second]):
        found = evaluator.run(["logits", "features"], vars(make_batch(step, words=1)) | caches)
        for got, want in zip(found, expected(target, step), strict=True):
            error = np.abs(got.astype(np.float32) - want) / np.abs(want).max()
            assert error.max() < most
            assert np.sqrt(np.square(error).mean()) < usual


def test_what_the_kernels_cannot_take_is_refused():
    with pytest.raises(ValueError, match="head size 32: TensorRT's plugins take 64, 96, 128, 256"):
        tensorrt_form(typed(tiny_target()))
    with pytest.raises(ValueError, match="qkv is FLOAT: TreeAttentionWrite takes bf16"):
        tensorrt_form(export_target_plugin(tiny_lm(), CACHE, aliased_outputs=True))
