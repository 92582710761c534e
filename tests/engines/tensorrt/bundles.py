"""Bundles of both TensorRT backends over the stand-in library."""

from __future__ import annotations

from redraft.bundle.config import LimitsInfo
from redraft.bundle.manifest import Bundle
from tests.engines.tensorrt import stand_in_tensorrt
from tests.engines.tiny import tiny_bundle, tiny_lm, tiny_target

LIMITS = LimitsInfo(slots=5, max_len=80, max_tree=8, prefill_chunk=16)
BACKENDS = {
    "tensorrt": (tiny_lm, "bf16", 0.1),
    "tensorrt, native": (tiny_lm, "bf16", 0.15),
    "tensorrt_rtx": (tiny_target, "fp32", 1e-5),
}
"""By backend and, where it has two, the target's form: the target, whose head size our kernels must take; the
precision; tolerated errors, as a share of the largest number."""


def bundle_of(backend: str, monkeypatch, folder, **options) -> Bundle:
    target, precision, _ = BACKENDS[backend]
    backend, _, form = backend.partition(", ")
    stand_in_tensorrt.install(monkeypatch, backend)
    given = {"target": target(), "precision": precision, "limits": LIMITS, "form": form or None} | options
    return tiny_bundle(folder, backend=backend, **given)
