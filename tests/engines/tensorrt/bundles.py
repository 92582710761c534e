"""Bundles of both TensorRT backends over the stand-in library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from redraft.bundle.config import LimitsInfo
from redraft.bundle.manifest import Bundle
from redraft.engines.tensorrt.session import Session, Step
from tests.engines.tensorrt import stand_in_tensorrt
from tests.engines.tiny import tiny_bundle, tiny_lm, tiny_target

LIMITS = LimitsInfo(slots=5, max_len=80, max_tree=8, prefill_chunk=16)
BACKENDS = {
    "tensorrt": (tiny_lm, "bf16", 0.1),
    "tensorrt, native": (tiny_lm, "bf16", 0.15),
    "tensorrt_rtx": (tiny_target, "fp32", 1e-5),
}
"""Targets by backend and, where it has two, by form: the target, whose head size our kernels must take; the
precision; tolerated errors, as a share of the largest number."""


@contextmanager
def recorded_steps() -> Iterator[list[tuple[Session, Step]]]:
    """The sessions and their steps that are asked for meanwhile."""
    recorded, own = list[tuple[Session, Step]](), Session.step

    def step(session: Session, number: int) -> Step:
        recorded.append((session, own(session, number)))
        return recorded[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "step", step)
        yield recorded


def bundle_of(backend: str, monkeypatch, folder, **options) -> Bundle:
    target, precision, _ = BACKENDS[backend]
    backend, _, form = backend.partition(", ")
    stand_in_tensorrt.install(monkeypatch, backend)
    given = {"target": target(), "precision": precision, "limits": LIMITS, "form": form or None}
    given |= options
    return tiny_bundle(folder, backend=backend, **given)
