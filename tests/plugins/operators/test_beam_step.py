import numpy as np
import pytest
import torch

from benchmarks.speed import kernel_calls
from redraft.plugins.operators.beam_step import torch_op
from redraft.plugins.operators.beam_step.reference import beam_step

BATCH, WIDTH, K, VOCABULARY = 3, 3, 5, 111


def level(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Descending log-probabilities and distinct ids of every node's likeliest children."""
    values = -np.sort(rng.exponential(size=(rows, K)).astype(np.float32))
    return values, np.stack([rng.permutation(VOCABULARY)[:K] for _ in range(rows)]).astype(np.int32)


def search(step, levels: list[tuple], width: int = WIDTH) -> list:
    """The results of every step of a beam search."""
    results = [step(*levels[0], width)]
    for values, ids in levels[1:]:
        results.append(step(values, ids, width, *results[-1][:4]))
    return results


def test_search_equals_reference(isa, rng):
    levels = [level(rng, BATCH), *(level(rng, BATCH * WIDTH) for _ in range(3))]
    expected = search(beam_step, [tuple(map(torch.from_numpy, arrays)) for arrays in levels])
    for found, wanted in zip(search(kernel_calls.beam_step, levels), expected, strict=True):
        for array, tensor in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(array, tensor.numpy(), strict=True)


def test_origins_and_tokens_are_those_of_the_chosen(rng):
    levels = [level(rng, BATCH), level(rng, BATCH * WIDTH)]
    first, second = search(kernel_calls.beam_step, levels)
    for (values, ids), (*_, chosen, tokens, origins) in zip(levels, (first, second), strict=True):
        nodes = len(values) // BATCH
        np.testing.assert_array_equal(tokens, ids[origins, chosen.flatten() % K])
        np.testing.assert_array_equal(origins // nodes, np.repeat(np.arange(BATCH), WIDTH))
    candidates, log_probs, parents = second[:3]
    assert np.isinf(log_probs[:, 0, 1:]).all()
    assert not candidates[:, 0, 1:].any()
    assert not parents[:, 0].any()
    np.testing.assert_array_equal(parents[:, 1], first[3])
    totals = np.take_along_axis(first[1].reshape(BATCH, -1), first[3], 1)
    np.testing.assert_array_equal(log_probs[:, 1], totals[..., None] + levels[1][0].reshape(BATCH, WIDTH, K))


def test_ties_go_to_the_lower_candidate():
    ids = np.arange(15, dtype=np.int32).reshape(3, 5)
    first = kernel_calls.beam_step(np.zeros((1, 5), np.float32), ids[:1], 3)
    np.testing.assert_array_equal(first[3], [[0, 1, 2]])
    values = np.array([[-1, -2, -3, -3, -3], [-1, -1, -1, -1, -1], [-1, -5, -5, -5, -5]], np.float32)
    chosen, tokens, origins = kernel_calls.beam_step(values, ids, 3, *first[:4])[3:]
    np.testing.assert_array_equal(chosen, [[0, 5, 6]])
    np.testing.assert_array_equal(tokens, [0, 5, 6])
    np.testing.assert_array_equal(origins, [0, 1, 1])


def test_numbers_that_are_none_choose_candidates_that_exist():
    values = np.full((2, 5), np.nan, np.float32)
    chosen = kernel_calls.beam_step(values, np.zeros((2, 5), np.int32), 3)[3]
    assert ((chosen >= 0) & (chosen < 5)).all()


def test_bad_arguments_are_named(rng):
    values, ids = level(rng, 3)
    with pytest.raises(ValueError, match="width 6: expected 1 to the number of candidates of a level"):
        kernel_calls.beam_step(values, ids, 6)
    *draft, _, _ = kernel_calls.beam_step(values[:1], ids[:1], 3)
    with pytest.raises(ValueError, match="rows of values 2"):
        kernel_calls.beam_step(values[:2], ids[:2], 3, *draft)
    draft[3][0, 1] = 15
    with pytest.raises(ValueError, match="chosen candidate 15: expected 0 to 14"):
        kernel_calls.beam_step(values, ids, 3, *draft)


def test_the_torch_operator_is_the_reference(rng):
    levels = [tuple(map(torch.from_numpy, level(rng, rows))) for rows in (BATCH, BATCH * WIDTH, BATCH * WIDTH)]
    for found, wanted in zip(search(torch_op.beam_step, levels), search(beam_step, levels), strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    draft = list(beam_step(*levels[0], WIDTH)[:4])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch_op._beam_step, (*levels[0], K, []), test_utils=checks)
    torch.library.opcheck(torch_op._beam_step, (*levels[1], WIDTH, draft), test_utils=checks)
