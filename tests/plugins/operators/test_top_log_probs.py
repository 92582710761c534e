"""The operator against torch's own, and the CUDA kernel against the operator's reference."""

from __future__ import annotations

import pytest
import torch

from redraft.plugins.operators.top_log_probs import cuda
from redraft.plugins.operators.top_log_probs.reference import top_log_probs
from redraft.plugins.operators.top_log_probs.torch_op import top_log_probs as operator

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def by_kernel(run_kernel, monkeypatch):
    monkeypatch.setattr(cuda, "run", run_kernel)
    return cuda.top_log_probs


def case(rows: int, columns: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with ties, as bf16 has them, and ids in another order than the columns."""
    generator = torch.Generator().manual_seed(columns)
    logits = (torch.randn(rows, columns, generator=generator) * scale).bfloat16()
    return logits, torch.randperm(2 * columns, generator=generator)[:columns].int()


def check(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert [x.dtype for x in found] == [torch.float32, torch.int32]
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-5, equal_nan=True)


def test_it_is_torchs_with_the_lower_column_first():
    logits, ids = case(3, 111, 1.0)
    values, _ = torch.log_softmax(logits.float(), -1).topk(30)
    found, tokens = operator(logits, ids, 30)
    assert torch.equal(found, values)
    columns = [ids.tolist().index(token) for token in tokens[0].tolist()]
    order = sorted(range(111), key=lambda column: (-float(logits[0, column]), column))
    assert columns == order[:30]
    assert len({*logits[0, columns].tolist()}) < 30, "some are equal"


@pytest.mark.parametrize("k", [1, 4, 10])
@pytest.mark.parametrize("columns", [111, 1000, 32000, 128256])
def test_the_kernel_is_the_reference(by_kernel, columns, k):
    logits, ids = case(3 if columns < 9999 else 2, columns)
    check(by_kernel(logits, ids, k), top_log_probs(logits, ids, k))


@pytest.mark.parametrize(("columns", "k"), [(1, 1), (7, 7), (111, 64), (4096, 513), (5000, 1024)])
def test_more_of_the_row_than_a_thread_each(by_kernel, columns, k):
    logits, ids = case(2, columns)
    check(by_kernel(logits, ids, k), top_log_probs(logits, ids, k))


def test_equal_logits_and_numbers_that_are_none(by_kernel):
    """More equals than there is room for, minus infinity, zeros of both signs, and rows of NaN and infinity."""
    logits, ids = torch.zeros(9, 6007).bfloat16(), torch.arange(6007, 0, -1, dtype=torch.int32)
    logits[1, 3::2] = -0.0
    logits[2] = -INF
    logits[3, 7:] = -INF
    logits[4, 100:3000] = 1
    logits[5, 5999] = 2
    logits[6, 17] = NAN
    logits[7, 18] = INF
    logits[8] = torch.arange(6007).bfloat16()
    for k in (1, 10, 600):
        found, expected = by_kernel(logits, ids, k), top_log_probs(logits, ids, k)
        check(found, expected)
        assert found[0][[2, 6, 7]].isnan().all()
        assert found[1][0].tolist() == ids[:k].tolist()


def test_a_row_has_the_bits_that_it_has_alone(by_kernel):
    """Wherever it begins in memory: an odd vocabulary puts rows at places that cannot be loaded at once."""
    logits, ids = case(3, 4101)
    values, tokens = by_kernel(logits, ids, 5)
    for row in range(3):
        own_values, own_tokens = by_kernel(logits[row : row + 1].clone(), ids, 5)
        assert torch.equal(own_values[0], values[row])
        assert torch.equal(own_tokens[0], tokens[row])


@pytest.mark.parametrize("k", [0, 112, 1025])
def test_what_does_not_fit_is_refused(k):
    columns = 111 if k < 1000 else 2000
    with pytest.raises(ValueError, match=rf"the {k} best of {columns} columns: expected 1 or more"):
        cuda.top_log_probs(*case(2, columns), k)
