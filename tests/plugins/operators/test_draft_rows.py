"""PairRows, DraftRows and Stack in OpenVINO, as nodes and as a Program, against their torch forms."""

import numpy as np
import openvino as ov
import pytest
import torch
from onnx import TensorProto, helper
from torch.overrides import TorchFunctionMode

from redraft.model_defs.loops.block import BlockRows
from redraft.plugins.library import extension_path
from redraft.plugins.operators.draft_rows.reference import draft_rows, pair_rows
from tests.plugins.cuda.test_draft_rows import place
from tests.plugins.test_openvino import compile_nodes, cpu_node

INTS = (TensorProto.INT32, None)


@pytest.fixture(scope="module")
def core() -> ov.Core:
    core = ov.Core()
    core.add_extension(str(extension_path()))
    return core


def rows_node(op: str, arguments: list[str], results: list[str], **attributes: int):
    return helper.make_node(op, arguments, results, domain="redraft", **attributes)


@pytest.mark.parametrize("fused", [False, True])
def test_pairs_and_two_levels_of_a_tree(core, rng, fused):
    widths = 17, 15, 9
    pairs = ["positions", "last_rows", "contexts", "roots", "sequences"]
    nodes = [rows_node("PairRows", ["tokens", "row_offsets", "cache_lengths"], pairs)]
    outputs = list(pairs)
    for level in (1, 2, 3):
        results = [f"{name}{level}" for name in ("positions", "row_offsets", "mask", "starts")]
        grown = [f"origins{level}", f"mask{level - 1}"] if level > 1 else []
        attributes = place(widths, level)
        nodes.append(rows_node("DraftRows", ["contexts", *grown], results, **attributes))
        outputs += results
    inputs = {name: (TensorProto.INT32, [None]) for name in ("tokens", "row_offsets", "cache_lengths")}
    inputs |= {f"origins{level}": (TensorProto.INT32, [None]) for level in (2, 3)}
    specs = dict.fromkeys(outputs, INTS)
    request = compile_nodes(core, nodes, inputs, specs, {}, fused).create_infer_request()
    for batch in (1, 3, 2):
        counts = rng.integers(1, 6, batch)
        given = {
            "tokens": rng.integers(0, 111, counts.sum()).astype(np.int32),
            "row_offsets": np.cumsum([0, *counts]).astype(np.int32),
            "cache_lengths": rng.integers(0, 50, batch).astype(np.int32),
        }
        for level in (2, 3):
            above, width = widths[level - 2 : level]
            own = np.repeat(np.arange(batch), width) * above
            given[f"origins{level}"] = (own + rng.integers(0, above, batch * width)).astype(np.int32)
        request.infer(given)
        expected = dict(zip(pairs, pair_rows(*map(torch.from_numpy, list(given.values())[:3])), strict=True))
        for level in (1, 2, 3):
            grown = [torch.from_numpy(given[f"origins{level}"]), expected[f"mask{level - 1}"]] if level > 1 else []
            rows = draft_rows(expected["contexts"], *grown, **place(widths, level))
            names = [f"{name}{level}" for name in ("positions", "row_offsets", "mask", "starts")]
            expected |= dict(zip(names, rows, strict=True))
        for name, tensor in expected.items():
            np.testing.assert_array_equal(request.get_tensor(name).data, tensor.numpy(), strict=True)


def test_nodes_that_do_not_fit_the_mask_are_refused(core):
    node = rows_node("DraftRows", ["contexts"], ["a", "b", "c", "d"], level=1, first=51, width=17, words=2)
    with pytest.raises(Exception, match="places 17 nodes behind 51 at level 1 in 2 mask words"):
        compile_nodes(core, [node], {"contexts": (TensorProto.INT32, [None])}, {"a": INTS}, {})


def test_masks_hold_the_path():
    """The second level's nodes 0 and 2 stand below nodes 1 and 0."""
    contexts, origins = torch.tensor([5], dtype=torch.int32), torch.tensor([1, 1, 0])
    *_, first, _ = draft_rows(contexts, level=1, first=0, width=3, words=1)
    positions, offsets, second, starts = draft_rows(contexts, origins, first, level=2, first=3, width=3, words=1)
    assert first.flatten().tolist() == [0b001, 0b010, 0b100]
    assert second.flatten().tolist() == [0b001010, 0b010010, 0b100001]
    assert (positions.tolist(), offsets.tolist(), starts.tolist()) == ([6] * 3, [0, 3], [8])


@pytest.mark.parametrize("fused", [False, True])
def test_stacked_rows_serve_one_product(core, rng, fused):
    """A program's output of several rows for each of its input's."""
    nodes = [
        cpu_node("Norm", ["a", "ones"], ["n"], eps=1e-6, inputs=""),
        cpu_node("Stack", ["a", "n", "b"], ["s"]),
        cpu_node("Norm", ["s", "ones"], ["y"], eps=1e-6, inputs=""),
    ]
    inputs = {name: (TensorProto.FLOAT, [None, 7]) for name in "ab"}
    model = compile_nodes(
        core, nodes, inputs, {"y": (TensorProto.FLOAT, [None, 7])}, {"ones": np.ones(7, np.float32)}, fused
    )
    for batch in (2, 1, 3):
        a, b = (rng.standard_normal((batch, 7)).astype(np.float32) for _ in "ab")
        norm = [x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) for x in (a, b)]
        again = norm[0] / np.sqrt((norm[0] ** 2).mean(-1, keepdims=True) + 1e-6)
        expected = np.stack([norm[0], again, norm[1]], axis=1).reshape(-1, 7)
        np.testing.assert_allclose(model([a, b])["y"], expected, atol=1e-5)


class OnDevice(TorchFunctionMode):
    """Refuses tensors that are made of the host's numbers, which a stream that is captured as a CUDA graph does not
    take."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("words", [0, 1, 2])
def test_rows_are_made_on_the_device(words):
    contexts, mask = torch.zeros(3, dtype=torch.int32, device="meta"), torch.zeros(9, 1, device="meta").int()
    with OnDevice():
        draft_rows(contexts, level=1, first=0, width=3, words=words)
        if words:
            draft_rows(contexts, contexts, mask, level=2, first=30, width=1, words=words)
        BlockRows.of(5 * words, True, contexts.device)


@pytest.mark.parametrize("width", [1, 3, 16, 17, 31, 32, 33])
def test_rows_of_a_block_see_each_other(width):
    mask = BlockRows.of(width, True, torch.device("cpu")).mask
    for row in range(2 * width):
        seen = {bit for bit in range(32 * mask.shape[1]) if int(mask[row, bit // 32]) >> bit % 32 & 1}
        assert seen == (set() if row < width else set(range(width)) - {row - width} | {row})
