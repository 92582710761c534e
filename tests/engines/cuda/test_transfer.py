"""Results are waited for once, after what the host does meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from redraft.engines.cuda.transfer import Results


def test_the_host_is_free_between_the_copies_and_the_wait(monkeypatch):
    happened = []
    stream = SimpleNamespace(synchronize=lambda: happened.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    results = Results(torch.device("cpu"))
    results._on_gpu = True
    (fetched,) = results.fetch([torch.arange(3)], lambda: happened.append("meanwhile"))
    assert fetched.tolist() == [0, 1, 2]
    assert happened == ["meanwhile", "waited"]
    results.fetch([torch.arange(3)])
    assert happened == ["meanwhile", "waited", "waited"]
