"""Bundles of both TensorRT backends over the stand-in library."""

from __future__ import annotations

from redraft.bundle import Bundle, LimitsInfo
from tests.engines import stand_in_tensorrt
from tests.engines.tiny import tiny_bundle, tiny_lm, tiny_target

LIMITS = LimitsInfo(slots=5, max_len=80, max_tree=8, prefill_chunk=16)
BACKENDS = {"tensorrt": (tiny_lm, "bf16", 0.1), "tensorrt_rtx": (tiny_target, "fp32", 1e-5)}
"""The target, which full TensorRT's kernels must have the head size of; the precision; tolerated errors, as a share of
the largest number."""


def bundle_of(backend: str, monkeypatch, folder, **options) -> Bundle:
    stand_in_tensorrt.install(monkeypatch, backend)
    target, precision, _ = BACKENDS[backend]
    given = {"target": target(), "precision": precision, "limits": LIMITS} | options
    return tiny_bundle(folder, backend=backend, **given)
