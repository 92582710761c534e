"""How far quantized networks are from the target in float32: the measure, and the comparison on a tiny target."""

from __future__ import annotations

import pytest
import torch

from benchmarks.speed.precision import Difference, compare, report
from redraft.compiler.calibration import calibrate
from tests.engines.tiny import tiny_target

TEXTS = [[5, 9, 2, 77, 31], [1, 110], list(range(20, 45))]


def test_divergence_by_hand():
    """KL((3/4, 1/4) | (1/2, 1/2)) = 3/4 ln 3/2 + 1/4 ln 1/2; the second position agrees."""
    difference = Difference("x", 1.0)
    reference = torch.tensor([[0.75, 0.25], [0.1, 0.9]]).log()
    difference.add(reference, torch.tensor([[0.49999, 0.50001], [0.1, 0.9]]).log())
    assert (difference.positions, difference.same) == (2, 1)
    assert difference.kl == pytest.approx(0.13081, abs=1e-4)
    assert difference.largest_kl == pytest.approx(difference.kl)


def test_precisions_of_a_tiny_target():
    """Positions that see what they must not, or rows of another text's, would make fp16 differ as well."""
    target = tiny_target()
    found = {entry.name: entry for entry in compare(target, TEXTS, calibrate(target, "", TEXTS))}
    assert list(found) == ["bf16", "fp16", "int8", "fp8"]
    assert {entry.positions for entry in found.values()} == {32}
    assert found["fp16"].kl / 32 < 1e-3
    assert found["fp16"].kl < found["int8"].kl < found["fp8"].kl
    assert found["int8"].megabytes < found["fp8"].megabytes < 0.7 * found["fp16"].megabytes
    assert report(list(found.values())).row_count == 4
