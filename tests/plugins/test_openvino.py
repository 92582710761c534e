import numpy as np
import onnx
import onnx_ir as ir
import openvino as ov
import pytest
from onnx import TensorProto, helper

from benchmarks.speed import kernel_calls
from redraft.compiler.passes.fusing import fuse
from redraft.plugins.operators.linear.blocks import BlockWeight
from redraft.plugins.operators.linear.pack import PRECISIONS, pack, pack_blocks
from tests.plugins.attention_case import Case, Sequence, make_case

CACHE_TYPES = {"fp32": (TensorProto.FLOAT, 1), "bf16": (TensorProto.UINT8, 2)}
"""By dtype: what a network declares a cache as, and how many of it a number takes."""


def compile_nodes(
    core: ov.Core, nodes: list, inputs: dict, outputs: dict, constants: dict, fused: bool = False
) -> ov.CompiledModel:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info(name, *spec) for name, spec in outputs.items()],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid(domain, 1) for domain in ("redraft", "redraft.cpu")]
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), *opsets])
    if fused:
        model = ir.to_proto(fuse(ir.from_proto(model)))
        assert {node.op_type for node in model.graph.node} <= {"Program", "Gather"}
    return core.compile_model(core.read_model(model.SerializeToString()), "CPU")


def cpu_node(op: str, arguments: list, results: list, **attributes: object) -> onnx.NodeProto:
    """helper.make_node, for operators whose attributes include one named `inputs`."""
    node = helper.make_node(op, arguments, results, domain="redraft.cpu")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return node


PLAIN = {"window": 0, "norm_eps": 0.0}
"""Attributes of a `TreeAttention` without a window and without norms."""


def attention(core: ov.Core, case: Case, dtype: str) -> ov.CompiledModel:
    specs = {name: (TensorProto.INT32, [None] * array.ndim) for name, array in case.arrays.items()}
    _, kv_heads, _, head_size = case.arrays["k_cache"].shape
    for name in ("qkv", "rope_table"):
        specs[name] = (TensorProto.FLOAT, [None, case.arrays[name].shape[1]])
    cache_type, width = CACHE_TYPES[dtype]
    for name in ("k_cache", "v_cache"):
        specs[name] = (cache_type, [None, kv_heads, None, width * head_size])
    attributes = {"num_heads": case.num_heads, "num_kv_heads": kv_heads, "head_size": head_size, **PLAIN}
    node = helper.make_node("TreeAttention", list(specs), ["out"], domain="redraft", **attributes)
    outputs = {"out": (TensorProto.FLOAT, [None, case.num_heads * head_size])}
    return compile_nodes(core, [node], specs, outputs, {})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tree_attention_updates_the_callers_caches(core, rng, dtype):
    sequences = [
        Sequence(slot=1, length=40, parents=[-1, 0, 0, 2], commits=(0, 3)),
        Sequence(slot=0, length=7, parents=20),
    ]
    case, direct = (make_case(np.random.default_rng(3), sequences, dtype=dtype) for _ in range(2))
    request = attention(core, case, dtype).create_infer_request()
    for name, array in case.arrays.items():
        stored = array.view(np.uint8) if name.endswith("_cache") and dtype == "bf16" else array
        request.set_tensor(name, ov.Tensor(stored, shared_memory=True))
    request.infer()
    np.testing.assert_array_equal(request.get_output_tensor().data, direct.run())
    for name in ("k_cache", "v_cache"):
        np.testing.assert_array_equal(case.arrays[name], direct.arrays[name])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", [*PRECISIONS, "segments"])
def test_linear_operators(core, rng, precision, fused):
    x = rng.standard_normal((5, 64)).astype(np.float32)
    weight, norm = rng.standard_normal((2 * 96, 64)).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    head, down = rng.standard_normal((100, 96)).astype(np.float32), rng.standard_normal((64, 96)).astype(np.float32)
    stored = "int8" if precision == "segments" else precision
    packed = {"gate_up": pack(weight, stored, "swiglu"), "down": pack(down, stored), "head": pack(head, stored)}
    if precision == "segments":
        parts = (head[:64], "int8"), (head[64:], "int4")
        packed["head"] = pack_blocks([BlockWeight.quantized(rows, precision) for rows, precision in parts])
    constants = {"norm": norm, "norm_bias": norm[::-1].copy(), "ids": np.arange(100, dtype=np.int32)[::-1].copy()}
    constants |= {name: weight.data for name, weight in packed.items()}

    def node(op: str, x: str, name: str, outputs: list, optional: str = "", **attributes: object) -> onnx.NodeProto:
        residual = "e0" if op == "Embedding" else "x"
        inputs = [x, name, *({"residual": residual}.get(n, n) for n in optional.split())]
        attributes |= {"clamped": 1, "factor": 0.5} if op == "Embedding" else {"norm_eps": 1e-6}
        if op == "Linear":
            attributes = {"activation": "none"} | attributes
        return cpu_node(op, inputs, outputs, dtype=packed[name].dtype, inputs=",".join(optional.split()), **attributes)

    sizes = {"in_features": 64, "out_features": 96}
    nodes = [
        node("Linear", "x", "gate_up", ["h"], "norm norm_bias", activation="swiglu", **sizes),
        node("Linear", "h", "down", ["y"], "residual", in_features=96, out_features=64),
        node("LinearTopK", "h", "head", ["values", "indices"], "rows ids", in_features=96, out_features=100, k=7),
        helper.make_node("Gather", ["indices", "zero"], ["indices_0"], axis=1),
        node("Embedding", "indices_0", "head", ["e0"], in_features=96, out_features=100),
        node("Embedding", "indices_0", "down", ["e"], "residual", in_features=96, out_features=64),
        cpu_node("Norm", ["y", "norm", "norm_bias", "x"], ["n"], eps=1e-6, inputs="norm_bias,residual"),
        cpu_node("Norm", ["y", "norm"], ["m"], eps=1e-6, inputs=""),
    ]
    inputs = {"x": (TensorProto.FLOAT, [None, 64]), "rows": (TensorProto.INT32, [None])}
    outputs = dict.fromkeys(("y", "values", "e", "n", "m"), (TensorProto.FLOAT, None))
    outputs["indices"] = (TensorProto.INT32, None)
    constants["zero"] = np.array(0, np.int64)
    model = compile_nodes(core, nodes, inputs, outputs, constants, fused)
    rows = np.array([4, 0, 2], np.int32)
    y, values, e, n, m, indices = (array.copy() for array in model([x, rows]).values())

    norms = {"norm": norm, "norm_bias": constants["norm_bias"], "norm_eps": 1e-6}
    h = kernel_calls.linear(x, packed["gate_up"], 96, activation="swiglu", **norms)
    expected = kernel_calls.linear(h, packed["down"], 64, residual=x)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(n, kernel_calls.norm(expected, norm, 1e-6, constants["norm_bias"], x))
    np.testing.assert_array_equal(m, kernel_calls.norm(expected, norm, 1e-6))
    best = kernel_calls.linear_topk(h, packed["head"], 100, 7, ids=constants["ids"], rows=rows)
    np.testing.assert_array_equal(values, best[0])
    np.testing.assert_array_equal(indices, best[1])
    ids = indices[:, 0].copy()
    assert ids.max() > 63
    e0 = kernel_calls.embedding(ids, packed["head"], 96, 100, factor=0.5)
    both = kernel_calls.embedding(ids, packed["down"], 96, 64, factor=0.5, residual=e0, clamped=True)
    np.testing.assert_array_equal(e, both)


def test_wrong_attributes_are_refused(core, rng):
    packed = pack(rng.standard_normal((96, 64)).astype(np.float32), "bf16").data
    spec = {"x": (TensorProto.FLOAT, [None, 64])}, {"y": (TensorProto.FLOAT, [None, 96])}, {"w": packed}
    for attributes, message in (
        ({"dtype": "fp16"}, "expected fp32, bf16 or block forms"),
        ({"dtype": "int8"}, "expected fp32, bf16 or block forms"),
        ({"dtype": "fp32"}, "elements"),
        ({"dtype": "q4_0:80,q4_k:16"}, "elements"),
        ({"dtype": "q4_0:80,q3_k:16"}, "'q3_k:16': expected a block form and rows, such as q4_k:1792 or i4g128:256"),
        ({"dtype": "q4_0g32:96"}, "expected a block form and rows"),
        ({"dtype": "i4:96"}, "expected a block form and rows"),
        ({"dtype": "i4g33:96"}, "span of a segment 33: expected a multiple of 32"),
        ({"dtype": "q4_0:-1"}, "expected a block form and rows"),
        ({"dtype": "bf16", "inputs": "norm"}, "says 3"),
        ({"dtype": "bf16", "inputs": "residual,norm"}, "out of order"),
        ({"dtype": "bf16", "inputs": "norm_bias"}, "norm_bias comes with norm only"),
    ):
        defaults = {"in_features": 64, "out_features": 96, "activation": "none", "norm_eps": 1e-5, "inputs": ""}
        node = cpu_node("Linear", ["x", "w"], ["y"], **defaults | attributes)
        with pytest.raises(Exception, match=message):
            compile_nodes(core, [node], *spec)


@pytest.mark.parametrize("fused", [False, True])
def test_two_levels_of_a_beam_search(core, rng, fused):
    """The embedded token of a chosen node, then its likeliest children; the batch changes from call to call."""
    table, ids = rng.standard_normal((111, 32)).astype(np.float32), rng.permutation(111).astype(np.int32)
    constants = {"table": pack(table, "fp32").data, "ids": ids}
    sizes = {"in_features": 32, "out_features": 111, "dtype": "fp32"}
    embedding = {"clamped": 0, "factor": 1.0, "inputs": "", **sizes}
    topk = {"norm_eps": 1e-5, "inputs": "ids", "k": 5, **sizes}
    draft = ["candidates", "log_probs", "parents", "chosen"]
    last = [f"last_{name}" for name in (*draft, "tokens", "origins")]
    nodes = [
        cpu_node("Embedding", ["roots", "table"], ["e0"], **embedding),
        cpu_node("LinearTopK", ["e0", "table", "ids"], ["values0", "ids0"], **topk),
        helper.make_node("BeamStep", ["values0", "ids0"], [*draft, "tokens", "origins"], domain="redraft", width=3),
        cpu_node("Embedding", ["tokens", "table"], ["e1"], **embedding),
        cpu_node("LinearTopK", ["e1", "table", "ids"], ["values1", "ids1"], **topk),
        helper.make_node("BeamStep", ["values1", "ids1", *draft], last, domain="redraft", width=3),
    ]
    outputs = dict.fromkeys(last, (TensorProto.INT32, None))
    outputs["last_log_probs"] = (TensorProto.FLOAT, None)
    model = compile_nodes(core, nodes, {"roots": (TensorProto.INT32, [None])}, outputs, constants, fused)
    packed = pack(table, "fp32")

    def level(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e = kernel_calls.embedding(tokens, packed, 32, 111)
        return kernel_calls.linear_topk(e, packed, 111, 5, ids=ids)

    for batch in (1, 3, 2):
        roots = rng.integers(0, 111, batch).astype(np.int32)
        *first, tokens, _ = kernel_calls.beam_step(*level(roots), 3)
        expected = kernel_calls.beam_step(*level(tokens), 3, *first)
        for name, array in zip(last, expected, strict=True):
            np.testing.assert_array_equal(model([roots])[name], array, strict=True)


def test_program_of_layers_equals_separate_nodes(core):
    """Two layers with caches, rows chosen at the end; row counts change from call to call."""
    weights = np.random.default_rng(5).standard_normal((192 + 64, 64)).astype(np.float32) * 0.1
    constants = {"qkv": pack(weights[:192], "bf16").data, "out": pack(weights[192:], "bf16").data}
    constants |= {"norm": np.ones(64, np.float32)}
    case = make_case(np.random.default_rng(3), [Sequence(0, 5, 1)], heads=2, kv_heads=2, head_size=32, cache_rows=40)
    integers = list(case.arrays)[1:8]
    inputs = {"x": (TensorProto.FLOAT, [None, 64]), "rows": (TensorProto.INT32, [None])}
    inputs |= {name: (TensorProto.INT32, [None] * case.arrays[name].ndim) for name in integers}
    constants["rope_table"] = case.arrays["rope_table"]
    linear = {"in_features": 64, "dtype": "bf16", "norm_eps": 1e-5, "activation": "none"}
    nodes, x = [], "x"
    for i in range(2):
        caches = [f"k{i}", f"v{i}"]
        inputs |= dict.fromkeys(caches, (TensorProto.FLOAT, [None, 2, None, 32]))
        nodes.append(cpu_node("Linear", [x, "qkv", "norm"], [f"q{i}"], out_features=192, inputs="norm", **linear))
        attributes = {"num_heads": 2, "num_kv_heads": 2, "head_size": 32, **PLAIN}
        arguments = [f"q{i}", *integers, "rope_table", *caches]
        nodes.append(helper.make_node("TreeAttention", arguments, [f"a{i}"], domain="redraft", **attributes))
        nodes.append(cpu_node("Linear", [f"a{i}", "out", x], [f"x{i}"], out_features=64, inputs="residual", **linear))
        x = f"x{i}"
    nodes.append(cpu_node("Linear", [x, "qkv", "rows"], ["logits"], out_features=192, inputs="rows", **linear))
    outputs = {"logits": (TensorProto.FLOAT, [None, 192]), x: (TensorProto.FLOAT, [None, 64])}
    results: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for fused, collected in results.items():
        request = compile_nodes(core, nodes, inputs, outputs, constants, fused).create_infer_request()
        memory = [np.zeros((1, 2, 40, 32), np.float32) for _ in range(4)]
        for name, array in zip(("k0", "v0", "k1", "v1"), memory, strict=True):
            request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        for step, tree in enumerate(([-1], [-1, 0, 0], 9, [-1, 0])):
            batch = make_case(np.random.default_rng(step), [Sequence(0, 5, tree)], heads=2, kv_heads=2, head_size=32)
            rows = len(batch.arrays["positions"])
            given = {name: batch.arrays[name] for name in integers} | {"rows": np.array([rows - 1], np.int32)}
            given["x"] = np.random.default_rng(step).standard_normal((rows, 64)).astype(np.float32)
            request.infer(given)
            collected += [request.get_tensor(name).data.copy() for name in outputs]
        collected += memory
    for separate, program in zip(results[False], results[True], strict=True):
        np.testing.assert_array_equal(separate, program)
    assert results[True][-1].any()
