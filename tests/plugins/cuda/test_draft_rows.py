"""The CUDA kernel of `DraftRows`, and its torch operator, against the reference."""

import numpy as np
import pytest
import torch

from redraft.plugins.operators.draft_rows import cuda, torch_op
from redraft.plugins.operators.draft_rows.reference import draft_rows


def place(widths: tuple[int, ...], level: int) -> dict[str, int]:
    """A level's attributes in a tree of these widths."""
    first, width = sum(widths[: level - 1]), widths[level - 1]
    return {"level": level, "first": first, "width": width, "words": -(-(first + width) // 32)}


@pytest.mark.parametrize(("batch", "widths"), [(1, (1, 1, 1)), (3, (17, 15, 9)), (70, (2, 4, 3))])
def test_the_cuda_kernel_and_the_torch_operator_agree(rng, batch, widths, run_kernel, monkeypatch):
    """Trees of one and of two words; sequences that fill more than a block."""
    monkeypatch.setattr(cuda, "run", run_kernel)
    contexts = torch.from_numpy(rng.integers(0, 90, batch).astype(np.int32))
    grown, mask = list[torch.Tensor](), contexts
    for level in (1, 2, 3):
        width = widths[level - 1]
        if level > 1:
            above = widths[level - 2]
            own = np.repeat(np.arange(batch), width) * above
            origins = (own + rng.integers(0, above, batch * width)).astype(np.int32)
            grown = [torch.from_numpy(origins), mask]
        expected = draft_rows(contexts, *grown, **place(widths, level))
        by_kernel = cuda.draft_rows(contexts, grown, **place(widths, level))
        by_operator = torch_op.draft_rows(contexts, *grown, **place(widths, level))
        for ours, op, theirs in zip(by_kernel, by_operator, expected, strict=True):
            assert torch.equal(ours, theirs)
            assert torch.equal(op, theirs)
            assert ours.dtype == theirs.dtype == op.dtype
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(
            torch_op._draft_rows, (contexts, grown, *place(widths, level).values()), test_utils=checks
        )
        mask = expected[2]


def test_the_cuda_kernel_makes_chains_and_refuses_what_does_not_fit():
    contexts = torch.tensor([4, 9, 0], dtype=torch.int32)
    chain = {"level": 3, "first": 2, "width": 1, "words": 0}
    for ours, theirs in zip(cuda.draft_rows(contexts, [], **chain), draft_rows(contexts, **chain), strict=True):
        assert torch.equal(ours, theirs)
    mask = torch.ones(3, 1, dtype=torch.int32)
    wild = cuda.draft_rows(contexts, [torch.tensor([-5, 10**6, 1], dtype=torch.int32), mask], 2, 1, 1, 1)
    assert wild[2].shape == (3, 1), "an index that is not there reads no other memory"
    for origins, before in ((contexts[:2], mask), (contexts, torch.ones(3, 2, dtype=torch.int32))):
        with pytest.raises(ValueError, match=r"expected 3 x 1 rows and at most 1 words"):
            cuda.draft_rows(contexts, [origins, before], 2, 1, 1, 1)
