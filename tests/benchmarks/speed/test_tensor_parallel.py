"""Step times and Table 3, from steps of known length and reports of two bundles."""

import json
import time
from types import SimpleNamespace

import pytest

from benchmarks.speed import tensor_parallel
from redraft.bundle.config import LimitsInfo
from redraft.engines.api import local_logits
from redraft.engines.ranks.parallel import ParallelEngine


def steps_of(engine):
    runtime = SimpleNamespace(engine=engine, limits=SimpleNamespace(max_tree=32))
    return tensor_parallel.time_steps(SimpleNamespace(runtime=runtime), 3, {1: 0.5})


class Sleeper:
    """An engine whose network takes so long, of which sums 1 ms."""

    def __init__(self, seconds, gather=local_logits):
        self.seconds, self.gather = seconds, gather

    def execute(self, batch, samplers=None):
        time.sleep(self.seconds)
        return self.gather(batch.input_ids), None

    def close(self):
        pass


@pytest.fixture
def sums(monkeypatch):
    monkeypatch.setattr(tensor_parallel.kernels, "take_exchange_seconds", lambda: 0.001)


def test_a_step_of_one_rank_is_compute_and_sums(sums):
    for step in steps_of(Sleeper(0.004)):
        assert step["step_ms"] >= 4
        assert step["compute_ms"] == pytest.approx(step["step_ms"] - 1)
        assert step["send_and_gather_ms"] == 0


def test_a_step_of_several_ranks_has_what_surrounds_the_network(sums):
    limits, target = LimitsInfo(slots=1, max_len=512, max_tree=32, prefill_chunk=64), SimpleNamespace(vocab_size=111)
    config = SimpleNamespace(limits=limits, target=target)
    ranks = SimpleNamespace(send=lambda *_: time.sleep(0.001), config=config, disconnect=lambda: None)
    engine = ParallelEngine(Sleeper(0.004, gather=lambda _: time.sleep(0.002)), ranks)
    steps = steps_of(engine)
    for step in steps:
        assert step["send_and_gather_ms"] >= 3
        assert step["compute_ms"] >= 3
        assert step["step_ms"] >= 7
    assert [step["pure_sums_ms"] for step in steps] == [0.5, 0, 0, 0]


def test_reports_stand_side_by_side(tmp_path, capsys):
    def report(ranks, speedup):
        entry = {"tokens_per_s": 100.0 * speedup, "speedup": speedup, "acceptance_length": 2.25, "drafting_share": 0.1}
        step = {"rows": 1, "step_ms": 9.0, "compute_ms": 8.0, "sums_ms": 0.7, "pure_sums_ms": 0.5}
        return {
            "ranks": ranks,
            "threads": 1,
            "steps": [step | {"send_and_gather_ms": 0.3}],
            "decoding": {"0": {"contenders": {"auto-regressive": entry | {"tokens_per_s": 100.0}, "redrafter": entry}}},
        }

    for ranks, speedup in ((1, 1.5), (2, 1.25)):
        (tmp_path / f"{ranks}.json").write_text(json.dumps(report(ranks, speedup)))
    paths = [str(tmp_path / f"{ranks}.json") for ranks in (1, 2)]
    assert tensor_parallel.main(["report", *paths, "--output", str(tmp_path / "both.json")]) == 0
    printed = capsys.readouterr().out
    assert "| TP 2, 1 thread a rank | 100.0 | 125.0 (1.25x, 2.25, 10%) |" in printed
    assert "| TP 1, 1 thread a rank | 1 | 9.00 | 8.00 | 0.70 | 0.50 | 0.30 |" in printed
    assert [entry["ranks"] for entry in json.loads((tmp_path / "both.json").read_text())["rows"]] == [1, 2]
