"""The GPU script's checks, as far as they run on the CPU."""

import pytest
import torch

from benchmarks.gpu import check_kernels
from benchmarks.gpu.check_kernels import (
    Heads,
    attended_bytes,
    causal,
    check,
    later_level,
    make_batch,
    padded,
    with_norms,
)

HEADS = Heads(3, 1, 64)


def test_a_mixed_batch_passes_and_a_wrong_output_does_not(monkeypatch):
    batch = make_batch(HEADS, [9, 0, 40], [5, 1, 33], chunk=7)
    assert attended_bytes(batch, HEADS) == 2 * 2 * 64 * (9 + 5 + 1 + 40 + 33 + 7)
    assert check(batch, HEADS, "cpu")["rms_error"] > 0
    attend = check_kernels.attend
    monkeypatch.setattr(check_kernels, "attend", lambda *arguments: attend(*arguments) + 0.05)
    with pytest.raises(ArithmeticError, match="output differs from the reference"):
        check(batch, HEADS, "cpu")
    monkeypatch.setattr(check_kernels, "attend", lambda found, heads: (attend(found, heads), found.v_cache.add_(1))[0])
    with pytest.raises(ArithmeticError, match="v_cache differs"):
        check(batch, HEADS, "cpu")


def test_fp32_is_held_to_its_own_tolerance_and_to_bits(monkeypatch):
    batch = make_batch(HEADS, [9, 0, 40], [5, 1, 33], chunk=7, dtype=torch.float32)
    assert check(batch, HEADS, "cpu")["max_error"] < 1e-5
    attend = check_kernels.attend
    monkeypatch.setattr(check_kernels, "attend", lambda found, heads: attend(found, heads) + 1e-6 * len(found.slots))
    with pytest.raises(ArithmeticError, match="sequence 0 alone has other bits than in the batch"):
        check(batch, HEADS, "cpu")


def noisy_padding(batch, out):
    out[int(batch.row_offsets[-1]) :] += 1e-4
    return out


BLIND = {
    "starts": (later_level, lambda batch: batch._replace(starts=None)),
    "starts of what is cached": (later_level, lambda batch: batch._replace(cache_lengths=batch.starts)),
    "norms": (with_norms, lambda batch: batch._replace(norms=None)),
    "whose norm is whose": (with_norms, lambda batch: batch._replace(norms=batch.norms[::-1])),
    "an absent mask": (causal, lambda batch: batch._replace(tree_mask=torch.ones_like(batch.positions)[:, None])),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", BLIND)
def test_what_a_kernel_must_not_overlook(kind, dtype, monkeypatch):
    change, overlook = BLIND[kind]
    batch = change(make_batch(HEADS, [9, 40], [5, 20], dtype=dtype))
    assert check(batch, HEADS, "cpu")["max_error"] < 0.03
    attend = check_kernels.attend
    monkeypatch.setattr(check_kernels, "attend", lambda found, heads: attend(overlook(found), heads))
    with pytest.raises(ArithmeticError, match="differs"):
        check(batch, HEADS, "cpu")


def test_rows_of_padding_come_out_as_zeros(monkeypatch):
    batch = padded(make_batch(HEADS, [9, 40], [5, 20]))
    check(batch, HEADS, "cpu")
    attend = check_kernels.attend
    monkeypatch.setattr(check_kernels, "attend", lambda found, heads: noisy_padding(found, attend(found, heads)))
    with pytest.raises(ArithmeticError, match="padding rows"):
        check(batch, HEADS, "cpu")
