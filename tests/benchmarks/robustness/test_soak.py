"""The soak: what counts as growth, and a short one on a real service.

The slow case starts Triton. It would catch cancelled requests that count as errors, and memory that nobody looks at.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.robustness.soak import growth, main
from redraft.serving import launcher
from tests.benchmarks.robustness.test_malformed import TOY_WORKER
from tests.openai.serving import toy_bundle
from tests.serving.client_side import free_ports, start

MB = 10**6
HOUR = [place * 36.0 for place in range(101)]


@pytest.mark.parametrize(
    ("sizes", "slope", "flat"),
    [
        ([300 * MB] * 101, 0.0, True),
        ([(300 + place) * MB for place in range(101)], 100.0, False),
        ([(100 + 20 * (place > 10)) * MB for place in range(101)], 0.0, True),
        ([(40 + 0.1 * place) * MB for place in range(101)], 10.0, True),
    ],
    ids=["flat", "leaks", "settles", "small"],
)
def test_growth_is_a_line_through_what_has_settled(sizes, slope, flat):
    found = growth(HOUR, sizes)
    assert found.mb_per_hour == pytest.approx(slope, abs=0.01)
    assert found.grown_mb == pytest.approx(0.75 * slope, abs=0.01)
    assert found.flat == flat


@pytest.mark.slow
def test_a_service_is_soaked(tmp_path: Path):
    bundle = toy_bundle(tmp_path / "bundle")
    (port,) = free_ports(1)
    start(tmp_path / "run", bundle, worker_command=TOY_WORKER, openai_port=port, max_queue=64)
    try:
        options = ["--run-dir", str(tmp_path / "run"), "--seconds", "5", "--share", "0.3", "--cancel", "0.5"]
        status = main([*options, "--prompts", "6", "--tokens", "9", "--output", str(tmp_path / "report.json")])
        report = json.loads((tmp_path / "report.json").read_text())
        assert (status, report["errors"], report["differing"], report["restarted"]) == (0, [], [], []), report
        assert min(report["whole"], report["cancelled"]) > 0
        assert {"worker", "guard", "Triton server", "model ensemble"} < set(report["memory"])
    finally:
        launcher.stop(tmp_path / "run")
