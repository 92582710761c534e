import numpy as np
import onnx
import openvino as ov
import pytest
from onnx import TensorProto, helper

from plugins import kernels
from plugins.library import extension_path
from plugins.linear.pack import pack
from tests.plugins.attention_case import Case, Sequence, make_case

CACHE_TYPES = {"fp32": TensorProto.FLOAT, "bf16": TensorProto.BFLOAT16}


@pytest.fixture(scope="module")
def core() -> ov.Core:
    core = ov.Core()
    core.add_extension(str(extension_path()))
    core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return core


def compile_nodes(core: ov.Core, nodes: list, inputs: dict, outputs: dict, constants: dict) -> ov.CompiledModel:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info(name, *spec) for name, spec in outputs.items()],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid(domain, 1) for domain in ("redraft", "redraft.cpu")]
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), *opsets])
    return core.compile_model(core.read_model(model.SerializeToString()), "CPU")


def cpu_node(op: str, arguments: list, results: list, **attributes: object) -> onnx.NodeProto:
    """helper.make_node, for operators whose attributes include one named `inputs`."""
    node = helper.make_node(op, arguments, results, domain="redraft.cpu")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return node


def attention(core: ov.Core, case: Case, dtype: str) -> ov.CompiledModel:
    specs = {name: (TensorProto.INT32, [None] * array.ndim) for name, array in case.arrays.items()}
    _, kv_heads, _, head_size = case.arrays["k_cache"].shape
    for name in ("qkv", "rope_table"):
        specs[name] = (TensorProto.FLOAT, [None, case.arrays[name].shape[1]])
    for name in ("k_cache", "v_cache"):
        specs[name] = (CACHE_TYPES[dtype], [None, kv_heads, None, head_size])
    attributes = {"num_heads": case.num_heads, "num_kv_heads": kv_heads, "head_size": head_size}
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
        if name.endswith("_cache") and dtype == "bf16":
            tensor = ov.Tensor(array, array.shape, ov.Type.bf16)
        else:
            tensor = ov.Tensor(array, shared_memory=True)
        request.set_tensor(name, tensor)
    request.infer()
    np.testing.assert_array_equal(request.get_output_tensor().data, direct.run())
    for name in ("k_cache", "v_cache"):
        np.testing.assert_array_equal(case.arrays[name], direct.arrays[name])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_linear_operators(core, rng, dtype):
    x = rng.standard_normal((5, 64)).astype(np.float32)
    weight, norm = rng.standard_normal((2 * 96, 64)).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    head, down = rng.standard_normal((100, 96)).astype(np.float32), rng.standard_normal((64, 96)).astype(np.float32)
    packed = {"gate_up": pack(weight, dtype, "swiglu"), "down": pack(down, dtype), "head": pack(head, dtype)}
    constants = {"norm": norm, "ids": np.arange(100, dtype=np.int32)[::-1].copy()}
    for name, (data, scale) in packed.items():
        constants[name] = data
        if scale is not None:
            constants[f"{name}.scale"] = scale

    def node(op: str, x: str, name: str, outputs: list, optional: str = "", **attributes: object) -> onnx.NodeProto:
        scaled = [f"{name}.scale"] if dtype == "int8" else []
        names = [*(["scale"] if scaled else []), *optional.split()]
        inputs = [x, name, *scaled, *({"residual": "x"}.get(n, n) for n in optional.split())]
        if op != "Embedding":
            attributes = {"inputs": ",".join(names), "norm_eps": 1e-6} | attributes
        if op == "Linear":
            attributes = {"activation": "none"} | attributes
        return cpu_node(op, inputs, outputs, dtype=dtype, **attributes)

    sizes = {"in_features": 64, "out_features": 96}
    nodes = [
        node("Linear", "x", "gate_up", ["h"], "norm", activation="swiglu", **sizes),
        node("Linear", "h", "down", ["y"], "residual", in_features=96, out_features=64),
        node("LinearTopK", "h", "head", ["values", "indices"], "rows ids", in_features=96, out_features=100, k=7),
        node("Embedding", "indices_0", "head", ["e"], in_features=96, out_features=100),
        helper.make_node("Gather", ["indices", "zero"], ["indices_0"], axis=1),
        helper.make_node("RMSNorm", ["y", "norm"], ["n"], domain="redraft.cpu", eps=1e-6),
    ]
    nodes = [*nodes[:3], nodes[4], nodes[3], nodes[5]]
    inputs = {"x": (TensorProto.FLOAT, [None, 64]), "rows": (TensorProto.INT32, [None])}
    outputs = dict.fromkeys(("y", "values", "e", "n"), (TensorProto.FLOAT, None))
    outputs["indices"] = (TensorProto.INT32, None)
    constants["zero"] = np.array(0, np.int64)
    model = compile_nodes(core, nodes, inputs, outputs, constants)
    rows = np.array([4, 0, 2], np.int32)
    y, values, e, n, indices = (array.copy() for array in model([x, rows]).values())

    h = kernels.linear(x, packed["gate_up"], 96, dtype, norm=norm, norm_eps=1e-6, activation="swiglu")
    expected = kernels.linear(h, packed["down"], 64, dtype, residual=x)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(n, kernels.rms_norm(expected, norm, 1e-6))
    best = kernels.linear_topk(h, packed["head"], 100, dtype, 7, ids=constants["ids"], rows=rows)
    np.testing.assert_array_equal(values, best[0])
    np.testing.assert_array_equal(indices, best[1])
    np.testing.assert_array_equal(e, kernels.embedding(indices[:, 0].copy(), packed["head"], 96, 100, dtype))


def test_wrong_attributes_are_refused(core, rng):
    packed = pack(rng.standard_normal((96, 64)).astype(np.float32), "bf16").data
    spec = {"x": (TensorProto.FLOAT, [None, 64])}, {"y": (TensorProto.FLOAT, [None, 96])}, {"w": packed}
    for attributes, message in (
        ({"dtype": "fp16"}, "expected fp32, bf16 or int8"),
        ({"dtype": "fp32"}, "elements"),
        ({"dtype": "bf16", "inputs": "norm"}, "says 3"),
        ({"dtype": "bf16", "inputs": "residual,norm"}, "out of order"),
    ):
        defaults = {"in_features": 64, "out_features": 96, "activation": "none", "norm_eps": 1e-5, "inputs": ""}
        node = cpu_node("Linear", ["x", "w"], ["y"], **defaults | attributes)
        with pytest.raises(Exception, match=message):
            compile_nodes(core, [node], *spec)
