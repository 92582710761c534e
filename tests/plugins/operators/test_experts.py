"""Mixtures of experts in OpenVINO, as a node and as a Program, against the reference."""

import numpy as np
import openvino as ov
import pytest
from onnx import TensorProto

from redraft.plugins.operators.experts.reference import experts
from redraft.plugins.operators.linear.blocks import ROUNDED
from redraft.plugins.operators.linear.pack import PRECISIONS, PackedWeight, bf16_bits, from_bf16_bits, pack
from tests.plugins.test_openvino import compile_nodes, cpu_node

COUNT, HIDDEN, COLUMNS, CHOSEN = 7, 46, 37, 3


def stack_of(matrices: np.ndarray, precision: str, activation: str = "none") -> PackedWeight:
    packed = [pack(matrix, precision, activation) for matrix in matrices]
    return PackedWeight(np.concatenate([each.data for each in packed]), packed[0].dtype)


def compiled(
    core: ov.Core, gate_up: np.ndarray, down: np.ndarray, precision: str, activation: str, normalized: int, fused: bool
) -> ov.InferRequest:
    stacks = {"gate_up": stack_of(gate_up, precision, activation), "down": stack_of(down, precision)}
    constants = {name: stack.data for name, stack in stacks.items()}
    dtypes = {"dtype": stacks["gate_up"].dtype, "down_dtype": stacks["down"].dtype}
    sizes = {"count": COUNT, "chosen": CHOSEN, "normalized": normalized, "in_features": HIDDEN, "columns": COLUMNS}
    inputs = {"x": (TensorProto.FLOAT, [None, HIDDEN]), "router": (TensorProto.FLOAT, [None, COUNT])}
    node = cpu_node("Experts", [*inputs, *constants, "x"], ["out"], activation=activation, **sizes, **dtypes)
    outputs = {"out": (TensorProto.FLOAT, [None, HIDDEN])}
    return compile_nodes(core, [node], inputs, outputs, constants, fused).create_infer_request()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("activation", "normalized", "fused"), [("swiglu", 1, True), ("geglu", 0, False)])
def test_experts_equal_reference(core, rng, precision, activation, normalized, fused):
    """A batch in which one expert is chosen by no row; and each row has the bits of the one alone."""
    shape = (COUNT, 2 * COLUMNS, HIDDEN), (COUNT, HIDDEN, COLUMNS)
    gate_up, down = (rng.standard_normal(sizes).astype(np.float32) * 0.2 for sizes in shape)
    request = compiled(core, gate_up, down, precision, activation, normalized, fused)
    x = from_bf16_bits(bf16_bits(rng.standard_normal((9, HIDDEN)).astype(np.float32)))
    router = rng.standard_normal((9, COUNT)).astype(np.float32)
    router[:, 4] = -50
    router[3] = 1  # the first of equal ones
    request.infer({"x": x, "router": router})
    found = request.get_output_tensor().data.copy()
    wanted = experts(x, router, gate_up, down, CHOSEN, bool(normalized), precision, activation, residual=x)
    np.testing.assert_allclose(found, wanted, atol={"fp32": 2e-5, "bf16": 0.02}.get(precision, 0.06))
    if precision in ROUNDED:  # in a row or two a number between two codes may be rounded to the other one
        assert (np.abs(found - wanted).max(1) < 2e-5).sum() >= 7
    for rows in ([5], [8, 0, 3]):
        request.infer({"x": x[rows], "router": router[rows]})
        np.testing.assert_array_equal(request.get_output_tensor().data, found[rows])


def test_a_router_of_other_rows_is_refused(core, rng):
    gate_up, down = np.zeros((COUNT, 2 * COLUMNS, HIDDEN), np.float32), np.zeros((COUNT, HIDDEN, COLUMNS), np.float32)
    request = compiled(core, gate_up, down, "fp32", "swiglu", 1, False)
    with pytest.raises(RuntimeError, match="the router has 2 rows: expected 3"):
        request.infer({"x": np.zeros((3, HIDDEN), np.float32), "router": np.zeros((2, COUNT), np.float32)})
