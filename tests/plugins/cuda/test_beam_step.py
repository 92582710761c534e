"""The CUDA kernel of `BeamStep` against the reference."""

import numpy as np
import pytest
import torch

from redraft.plugins.operators.beam_step import cuda
from redraft.plugins.operators.beam_step.reference import beam_step
from tests.plugins.operators.test_beam_step import BATCH, level, search


@pytest.fixture
def by_kernel(run_kernel, monkeypatch):
    monkeypatch.setattr(cuda, "run", run_kernel)
    return lambda values, ids, width, *draft: cuda.beam_step(values, ids, width, list(draft))


def tensors(levels: list[tuple]) -> list[tuple]:
    return [tuple(map(torch.from_numpy, arrays)) for arrays in levels]


@pytest.mark.parametrize("width", [1, 3, 5])
def test_search_equals_reference(rng, width, by_kernel):
    levels = tensors([level(rng, BATCH), *(level(rng, BATCH * width) for _ in range(3))])
    expected = search(beam_step, levels, width)
    for found, wanted in zip(search(by_kernel, levels, width), expected, strict=True):
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype == theirs.dtype


def test_ties_and_numbers_that_are_none(by_kernel):
    ids = torch.arange(15, dtype=torch.int32).reshape(3, 5)
    first = by_kernel(torch.zeros(1, 5), ids[:1], 3)
    assert first[3].tolist() == [[0, 1, 2]]
    values = torch.tensor([[-1.0, -2, -3, -3, -3], [-1, -1, -1, -1, -1], [-1, -5, -5, -5, -5]])
    chosen, tokens, origins = by_kernel(values, ids, 3, *first[:4])[3:]
    assert (chosen.tolist(), tokens.tolist(), origins.tolist()) == ([[0, 5, 6]], [0, 5, 6], [0, 1, 1])
    values[0], values[2, 2] = np.nan, -np.inf
    assert len({*by_kernel(values, ids, 3, *first[:4])[3][0].tolist()}) == 3
    wild = [*first[:3], torch.tensor([[-7, 10**6, 2]], dtype=torch.int32)]
    assert by_kernel(values, ids, 3, *wild)[0].shape == (1, 2, 3, 5), "an index that is not there reads no other memory"


def test_what_does_not_fit_is_refused(rng):
    values, ids = map(torch.from_numpy, level(rng, 3))
    for width in (6, 410):
        with pytest.raises(ValueError, match=rf"width {width} of 3 rows of 5 candidates for 3 sequences: expected"):
            cuda.beam_step(values, ids, width, [])
    draft = cuda.beam_step(values[:2], ids[:2], 3, [])[:4]
    with pytest.raises(ValueError, match="width 3 of 3 rows of 5 candidates for 2 sequences"):
        cuda.beam_step(values, ids, 3, draft)
