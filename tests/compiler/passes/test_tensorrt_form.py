"""The strongly typed plugin form for TensorRT: against the CPU's file, and run by the kernels' own code."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from redraft.compiler.calibration import calibrate
from redraft.compiler.passes import tensorrt_all_reduce as all_reduce
from redraft.compiler.passes.quantization import quantize_network, quantize_weight
from redraft.compiler.passes.tensorrt_all_reduce import COLLECTIVE
from redraft.compiler.passes.tensorrt_attention import tensorrt_form
from redraft.model_defs.export.target import CacheShape, export_target_plugin
from redraft.model_defs.target.model import Target
from redraft.model_defs.target.shards import plan_shards, shard_target
from redraft.plugins.cuda.declaration import NAMESPACE
from redraft.plugins.operators.tree_attention.tensorrt_plugin import COMBINE, KERNELS, SPLIT, WRITE, eps_bits
from tests.compiler.passes.test_quantization import fake_quantized
from tests.engines.tensorrt.stand_in_tensorrt import plugin
from tests.engines.tiny import VOCAB, chain, expected, make_batch, random_model, random_tree, tiny_lm, tiny_target

CACHE = CacheShape(4, 40, 8)
RANKED = random_model(
    dataclasses.replace(tiny_lm().config, num_heads=6, num_kv_heads=3, intermediate_size=201, qk_norm=True)
)
"""Three KV groups, 2 + 1 on two ranks, and norms of query and key heads."""


def normed_lm() -> Target:
    return random_model(dataclasses.replace(tiny_lm().config, qk_norm=True))


TEXTS = [[5, 9, 2, 77, 31], [1, 110, 3], list(range(20, 45))]
TOLERANCES = {"bf16": (0.06, 0.01), "int8": (0.1, 0.02), "fp8": (0.5, 0.1)}
"""Largest and mean square error, as a share of the largest number. A float8 that lies between two may become either."""


def typed(target: Target) -> ir.Model:
    """The target's plugin form in bf16."""
    return export_target_plugin(target.bfloat16(), CACHE, cache_dtype=torch.bfloat16, aliased_outputs=True)


@pytest.fixture(scope="module")
def cpu() -> ir.Model:
    return export_target_plugin(tiny_lm(), CACHE)


@pytest.fixture(scope="module")
def tensorrt() -> ir.Model:
    return tensorrt_form(typed(tiny_lm()))


def described(network: ir.Model, weights: ir.Model | None = None) -> tuple[list, list, list]:
    """A network's inputs, nodes and outputs without dtypes and without the exporter's names for values. Nodes stand in
    order, each with its attributes and with what its inputs are; plugins that compute a `TreeAttention` count as one,
    as do the nodes that compute an `AllReduce`. Quantized and dequantized values are what they were, rows of 8-bit
    weights those of `weights`, the network before quantization."""
    graph = network.graph
    known: dict[ir.Value | None, object] = {value: value.name for value in graph.inputs}
    known |= {value: constant(value) for value in graph.initializers.values()}
    nodes: list[tuple] = []
    pending: list[ir.Node] = []
    for node in graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            stored = graph.initializers.get(node.inputs[0].name)
            known[node.outputs[0]] = known[node.inputs[0]] if stored is None else constant(original(stored, weights))
            continue
        pending.append(node)
        sums = pending[0].op_type == COLLECTIVE and [node.op_type for node in pending].count("Cast") < 2
        if sums or node.op_type in (WRITE.name, SPLIT.name):
            continue
        known |= {value: (len(nodes), i) for i, value in enumerate(node.outputs)}
        if node.op_type in ("TreeAttention", COMBINE.name):
            nodes.append(attention_of(pending, known))
        elif pending[0].op_type == COLLECTIVE:
            nodes.append(sum_of(pending, known))
        else:  # a Cast's or a constant's dtype is a dtype
            attributes = {name: a.value for name, a in node.attributes.items() if name not in ("to", "stash_type")}
            nodes.append((node.domain, node.op_type, attributes, [known.get(value) for value in node.inputs]))
        pending = []
    inputs = [(value.name, str(value.shape)) for value in graph.inputs]
    outputs = [(value.name, str(value.shape), known[value]) for value in graph.outputs if value in known]
    return inputs, nodes, [output for output in outputs if ".updated" not in output[0]]


def constant(value: ir.Value) -> tuple:
    """Its shape and its numbers, rounded to bf16."""
    array = value.const_value.numpy()
    kept = array.astype(ml_dtypes.bfloat16).astype(np.float32) if array.dtype.kind not in "iub" else array
    return array.shape, kept.tobytes()


def original(stored: ir.Value, network: ir.Model) -> ir.Value:
    """The weight of `network` that 8-bit values are of: they are what it becomes."""
    layer, precision = stored.name.removesuffix(".int8").removesuffix(".fp8"), stored.name.rpartition(".")[2]
    weight = network.graph.initializers.get(layer) or network.graph.initializers[f"target.{layer}"]
    array = weight.const_value.numpy()
    assert np.array_equal(stored.const_value.numpy(), quantize_weight(array, precision, array.dtype).values)
    return weight


def sum_of(nodes: list[ir.Node], known: dict) -> tuple:
    """An `AllReduce` node's words, of the nodes that gather and add in the order of ranks."""
    ranks = nodes[0].attributes["nb_rank"].as_int()
    assert [node.op_type for node in nodes] == [
        *(COLLECTIVE, "Constant", "Reshape", "Cast", "Constant", "Gather"),
        *(["Constant", "Gather", "Add"] * (ranks - 1)),
        "Cast",
    ]
    parts = [node for node in nodes if node.op_type == "Gather"]
    assert [int(part.inputs[1].producer().attributes["value"].value.numpy()) for part in parts] == list(range(ranks))
    return NAMESPACE, "AllReduce", {"ranks": ranks}, [known[nodes[0].inputs[0]]]


def attention_of(nodes: list[ir.Node], known: dict[ir.Value, object]) -> tuple:
    """A `TreeAttention` node or the plugins in its place, in the same words."""
    if len(nodes) == 1:
        names = ["qkv", "positions", "row_offsets", "slots", "cache_lengths", "tree_mask", "commit_src"]
        names += [
            "commit_offsets",
            "rope_table",
            "k_cache",
            "v_cache",
            *["q_norm", "k_norm"][: len(nodes[0].inputs) - 11],
        ]
        taken = dict(zip(names, (known[value] for value in nodes[0].inputs), strict=True))
        sizes = {name.removeprefix("num_"): a.value for name, a in nodes[0].attributes.items()}
        sizes["norm_eps"] = eps_bits(sizes["norm_eps"]) if "q_norm" in taken else 0
        return taken | {"starts": taken["cache_lengths"]}, sizes
    assert [node.op_type for node in nodes] == [kernel.name for kernel in KERNELS]
    made = {value for node in nodes for value in node.outputs}
    taken, sizes, found_by = {}, {}, ("plugin_namespace", "plugin_version", "aot")
    known_only = (*found_by, "alias")
    for node, kernel in zip(nodes, KERNELS, strict=True):
        for argument, value in zip(kernel.inputs, node.inputs, strict=True):
            if value not in made:
                assert taken.setdefault(argument.name, known[value]) == known[value]
        own = {name: a.value for name, a in node.attributes.items() if name not in known_only}
        assert [node.attributes[name].value for name in found_by] == [NAMESPACE, "1", 1]
        assert set(own) == set(kernel.attributes)
        sizes |= own
    if not sizes["norm_eps"]:
        del taken["q_norm"], taken["k_norm"]  # which the kernel does not read
    return taken, sizes


def test_it_differs_from_the_cpus_file_in_dtypes_and_in_the_caches_aliasing_alone(cpu, tensorrt):
    """The same inputs by name, order and shape; the same constants up to bf16's rounding; the same nodes in the same
    order with the same attributes on the same values, where the three plugins count as the one operator that they
    compute; the same outputs. Beyond that the second file has the updated caches as outputs."""
    for of_cpu, of_tensorrt in zip(described(cpu), described(tensorrt), strict=True):
        assert of_cpu == of_tensorrt

    layers = tiny_lm().config.num_layers
    aliased = tensorrt.graph.outputs[2:]
    assert [value.name for value in cpu.graph.outputs] == ["logits", "features"]
    assert [value.name for value in aliased] == [f"{k}_cache.{i}.updated" for k in "kv" for i in range(layers)]
    for value in aliased:
        node = value.producer()
        place = list(node.outputs).index(value)
        source = node.inputs[[a.name for a in WRITE.inputs].index(WRITE.outputs[place].in_place_of)]
        assert (node.op_type, f"{source.name}.updated") == (WRITE.name, value.name)
    assert {value.dtype for value in cpu.graph.inputs} == {ir.DataType.INT32, ir.DataType.FLOAT}
    assert {value.dtype for value in tensorrt.graph.inputs} == {ir.DataType.INT32, ir.DataType.BFLOAT16}


@pytest.mark.parametrize("rank", [0, 1])
def test_so_does_a_ranks_file(rank):
    """Of uneven shards; the gathered and added parts count as the one sum that they are."""
    shard = plan_shards(RANKED.config, 2)[rank]
    files = [
        export_target_plugin(shard_target(RANKED, shard), CACHE, rank=rank, ranks=2),
        export_target_plugin(
            shard_target(RANKED, shard).bfloat16(),
            CACHE,
            cache_dtype=torch.bfloat16,
            aliased_outputs=True,
            rank=rank,
            ranks=2,
        ),
    ]
    files[1] = all_reduce.tensorrt_form(tensorrt_form(files[1]))
    of_cpu, of_tensorrt = map(described, files)
    assert of_cpu == of_tensorrt
    assert {"q_norm", "k_norm"} < {name for node in of_cpu[1] if len(node) == 2 for name in node[0]}
    sums = [node for node in of_cpu[1] if node[1] == "AllReduce"]
    assert len(sums) == 2 * RANKED.config.num_layers


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_so_does_a_file_in_8_bits(cpu, precision):
    """Where a value that was quantized and dequantized counts as what it was."""
    before = typed(tiny_lm())
    largest = calibrate(tiny_lm(), "", TEXTS).largest_inputs
    assert described(cpu) == described(tensorrt_form(quantize_network(before, precision, largest)), before)


def test_keys_are_read_from_what_the_write_returns(tensorrt):
    """Else TensorRT could read before it writes."""
    for node in tensorrt.graph:
        if node.op_type == SPLIT.name:
            caches = [value for value, a in zip(node.inputs, SPLIT.inputs, strict=True) if a.name.endswith("_cache")]
            assert [value.producer().op_type for value in caches] == [WRITE.name] * 2


@pytest.mark.parametrize(("precision", "of"), [*((name, tiny_lm) for name in TOLERANCES), ("bf16", normed_lm)])
def test_the_file_computes_what_the_module_does(precision, of):
    """In 8 bits, what a module with weights and inputs rounded to 8 bits does."""
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
