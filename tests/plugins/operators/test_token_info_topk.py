import numpy as np
import pytest
import torch

from benchmarks.speed import kernel_calls
from redraft.plugins import kernels
from redraft.plugins.operators.linear.pack import bf16_bits
from redraft.plugins.operators.token_info_topk.reference import token_info_topk

VOCABULARY, LEVELS = 1300, 3


def case(rng, columns: int, kept: int, batch: int = 3, nodes: int = 5) -> tuple[list[np.ndarray], tuple]:
    """Inputs and a table; a few tokens have no token info."""
    ids = rng.permutation(VOCABULARY)[:columns].astype(np.int32)
    row_of = np.full(VOCABULARY, kept, np.int32)
    row_of[ids[:kept]] = np.arange(kept)
    table = rng.integers(-127, 128, (kept + 1, kept)).astype(np.int8)
    table[kept] = 0
    scales = rng.uniform(0.01, 0.05, (kept + 1, 1)).astype(np.float32)
    logits = 3 * rng.standard_normal((batch * LEVELS, columns)).astype(np.float32)
    tokens = rng.integers(0, VOCABULARY, nodes).astype(np.int32)
    tokens[0] = ids[0]
    return [logits, rng.integers(0, batch, nodes).astype(np.int32), tokens, ids], (row_of, table, scales)


@pytest.mark.parametrize(("columns", "kept"), [(111, 37), (1029, 1029), (600, 256), (7, 1)])
@pytest.mark.parametrize("informed", ["", "int8", "bf16", "rows"])
def test_equals_reference(isa, rng, columns, kept, informed):
    arrays, (row_of, rows, scales) = case(rng, columns, kept)
    sizes = {"k": 6, "level": 2, "levels": LEVELS}
    info = {
        "": (),
        "int8": (row_of, rows, scales),
        "bf16": (row_of, bf16_bits(rows * np.float32(0.7)), scales),
        "rows": (rng.standard_normal((len(arrays[2]), kept)).astype(np.float32),),
    }[informed]
    values, ids = kernel_calls.token_info_topk(*arrays, *info, **sizes)
    stored = [torch.from_numpy(array) for array in info]
    if informed == "bf16":
        stored[1] = torch.from_numpy(info[1].view(np.int16)).view(torch.bfloat16)
    expected = token_info_topk(*map(torch.from_numpy, arrays), *stored, **sizes)
    np.testing.assert_allclose(values, expected[0].numpy(), atol=2e-5)
    np.testing.assert_array_equal(ids, expected[1].numpy())
    if informed and kept > 1:
        assert (values != kernel_calls.token_info_topk(*arrays, **sizes)[0]).any(), "token info matters"


def test_a_node_does_not_depend_on_others_nor_on_threads(isa, rng):
    arrays, table = case(rng, 1029, 700, nodes=7)
    sizes = {"k": 9, "level": 1, "levels": LEVELS}
    together = kernel_calls.token_info_topk(*arrays, *table, **sizes)
    try:
        kernels.set_threads(1)
        for n in (0, 3, 6):
            logits, sequences, tokens, ids = arrays
            alone = kernel_calls.token_info_topk(
                logits, sequences[n : n + 1].copy(), tokens[n : n + 1].copy(), ids, *table, **sizes
            )
            for array, whole in zip(alone, together, strict=True):
                np.testing.assert_array_equal(array[0], whole[n])
    finally:
        kernels.set_threads(2)


def test_bad_arguments_are_named(rng):
    arrays, table = case(rng, 111, 37)
    sizes = {"k": 6, "level": 2, "levels": LEVELS}
    for place, value, message in (
        (1, 3, "sequence 3: expected 0 to 2"),
        (2, VOCABULARY, "token id 1300: expected 0 to 1299"),
    ):
        wrong = [array.copy() for array in arrays]
        wrong[place][1] = value
        with pytest.raises(ValueError, match=message):
            kernel_calls.token_info_topk(*wrong, *table, **sizes)
    with pytest.raises(ValueError, match="rows of token info 4: expected a row for each node"):
        kernel_calls.token_info_topk(*arrays, np.zeros((4, 37), np.float32), **sizes)
    with pytest.raises(ValueError, match="level 3: expected 0 to 2"):
        kernel_calls.token_info_topk(*arrays, *table, k=6, level=3, levels=LEVELS)
