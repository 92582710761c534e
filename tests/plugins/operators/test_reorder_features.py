"""ReorderFeatures as a kernel, and in OpenVINO as a node and within a Program."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from benchmarks.speed import kernel_calls
from redraft.plugins import kernels
from redraft.plugins.operators.reorder_features.reference import reorder_features
from tests.plugins.test_openvino import compile_nodes, cpu_node

FEATURES = 7


@pytest.mark.parametrize(("rows", "features"), [(1, 111), (3, 111), (130, 32), (5, 1)])
def test_the_kernel_equals_its_reference(isa, rng, rows, features):
    x, order = rng.standard_normal((rows, features)).astype(np.float32), rng.permutation(features).astype(np.int32)
    expected = reorder_features(x, order)
    try:
        for threads in (1, 2, 5):
            kernels.set_threads(threads)
            np.testing.assert_array_equal(kernel_calls.reorder_features(x, order), expected)
    finally:
        kernels.set_threads(2)


@pytest.mark.parametrize("wrong", [111, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("at", [0, 60, 110])
def test_a_feature_that_is_not_there_is_named(rng, wrong, at):
    order = rng.permutation(111).astype(np.int32)
    order[at] = wrong
    with pytest.raises(ValueError, match=f"feature {wrong}: expected 0 to 110"):
        kernel_calls.reorder_features(np.zeros((3, 111), np.float32), order)


def compiled(core, order: list[int], fused: bool):
    nodes = [
        cpu_node("Norm", ["x", "ones"], ["n"], eps=1e-6, inputs=""),
        cpu_node("ReorderFeatures", ["n", "order"], ["y"]),
    ]
    constants = {"ones": np.ones(FEATURES, np.float32), "order": np.array(order, np.int32)}
    floats = (TensorProto.FLOAT, [None, FEATURES])
    return compile_nodes(core, nodes, {"x": floats}, {"y": floats}, constants, fused)


@pytest.mark.parametrize("fused", [False, True])
def test_features_come_in_their_order(core, rng, fused):
    order = rng.permutation(FEATURES).tolist()
    model = compiled(core, order, fused)
    for rows in (3, 1, 5):
        x = rng.standard_normal((rows, FEATURES)).astype(np.float32)
        expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(model([x])["y"], expected[:, order], atol=1e-6)


@pytest.mark.parametrize("wrong", [FEATURES, -1])
def test_a_feature_that_is_not_there_is_refused(core, wrong):
    model = compiled(core, [0, 1, 2, wrong, 4, 5, 6], False)
    with pytest.raises(Exception, match=f"feature {wrong}: expected 0 to 6"):
        model([np.zeros((1, FEATURES), np.float32)])
