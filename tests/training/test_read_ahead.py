"""Batches that a thread reads ahead for a GPU; the device "meta" stands for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from redraft.model_defs.drafters.windows import NO_DOCUMENT, Windows
from redraft.training import run

META = torch.device("meta")


def windows(drafted: int) -> Windows:
    """One window of 7 tokens, of which 4 can be drafted from."""
    documents = torch.zeros(1, 7, dtype=torch.long)
    documents[:, 5:] = NO_DOCUMENT
    mask = (torch.arange(4) < drafted)[None]
    return Windows(torch.arange(7)[None], torch.zeros(1, 7, 3), documents, torch.arange(4)[None], mask)


def test_batches_come_in_order_on_the_device_with_their_positions():
    for device in (META, torch.device("cpu")):
        read = list(zip(range(4), run.read_ahead(iter(map(windows, (1, 4, 2, 0))), device), strict=False))
        assert [positions for _, (_, positions) in read] == [1, 3, 2, 0]
        assert all(batch.hidden.device == device for _, (batch, _) in read)


def test_only_a_few_are_read_ahead():
    read = []

    def batches() -> Iterator[Windows]:
        while True:
            read.append(len(read))
            yield windows(1)

    ahead = run.read_ahead(batches(), META)
    for _ in range(3):
        next(ahead)
    assert len(read) <= 3 + run.AHEAD + 2


def test_a_failure_while_reading_is_raised():
    def batches() -> Iterator[Windows]:
        yield windows(1)
        raise OSError("the disk is gone")

    ahead = run.read_ahead(batches(), META)
    next(ahead)
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
