"""Bundles on a device: those that run are timed, those that do not are answered with the reason."""

import json
import os

import pytest
import torch

from benchmarks.gpu import engines
from tests.engines.tensorrt import stand_in_tensorrt
from tests.engines.tiny import LIMITS, METHOD, tiny_bundle, tiny_target


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorrt_rtx"])
def test_times_and_reasons(backend, tmp_path, monkeypatch):
    """The library of TensorRT for RTX is a stand-in, which computes on the CPU. It would catch a backend that the GPU
    machine's first report does not time."""
    monkeypatch.setattr("benchmarks.speed.step_times.CONTEXT", 32)
    monkeypatch.setattr("redraft.engines.torch.available_device", lambda: torch.device("cpu"))
    if backend == "tensorrt_rtx":
        stand_in_tensorrt.install(monkeypatch, backend)
    limits = LIMITS.model_copy(update={"prefill_chunk": 64})
    bundle = tiny_bundle(tmp_path, tiny_target(), backend, limits=limits)
    output = tmp_path / "r.json"
    arguments = [str(bundle.path), str(tmp_path / "nowhere"), "--repeats", "1"]
    engines.main([*arguments, "--device", "cpu", "--output", str(output)])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    runs, missing = json.loads(output.read_text())["bundles"]
    assert (runs["backend"], runs["loads"], runs["runs"]) == (backend, True, True)
    rows = {(entry["sequences"], entry["rows"]) for entry in runs["times"]}
    assert {(1, count) for count in (1, 2, 4, 8, 16, 32, 64)} <= rows
    assert {entry["sequences"] for entry in runs["times"] if entry["method"] == METHOD} == {1, 2, 4, 8}
    assert not missing["loads"]
    assert "nowhere does not exist" in missing["error"]


def test_an_engine_that_fails_is_an_answer(tmp_path, monkeypatch):
    def broken(engine, bundle, repeats):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr("benchmarks.speed.step_times.measure", broken)
    found = engines.run(tiny_bundle(tmp_path, tiny_target(), drafts=False).path, 1)
    assert (found["loads"], found["runs"], found["error"]) == (True, False, "RuntimeError: no kernel image")
