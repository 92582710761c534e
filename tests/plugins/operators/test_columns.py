"""Columns in OpenVINO, as a node and within a Program."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from tests.plugins.test_openvino import compile_nodes, cpu_node

FEATURES = 7


def compiled(core, columns: list[int], fused: bool):
    nodes = [
        cpu_node("Norm", ["x", "ones"], ["n"], eps=1e-6, inputs=""),
        cpu_node("Columns", ["n", "columns"], ["y"]),
    ]
    constants = {"ones": np.ones(FEATURES, np.float32), "columns": np.array(columns, np.int32)}
    floats = (TensorProto.FLOAT, [None, FEATURES])
    return compile_nodes(core, nodes, {"x": floats}, {"y": floats}, constants, fused)


@pytest.mark.parametrize("fused", [False, True])
def test_features_come_in_the_order_of_columns(core, rng, fused):
    columns = rng.permutation(FEATURES).tolist()
    model = compiled(core, columns, fused)
    for rows in (3, 1, 5):
        x = rng.standard_normal((rows, FEATURES)).astype(np.float32)
        expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(model([x])["y"], expected[:, columns], atol=1e-6)


@pytest.mark.parametrize("wrong", [FEATURES, -1])
def test_columns_that_are_not_there_are_refused(core, wrong):
    model = compiled(core, [0, 1, 2, wrong, 4, 5, 6], False)
    with pytest.raises(Exception, match=f"columns has {wrong}: expected 0 to 6"):
        model([np.zeros((1, FEATURES), np.float32)])
