"""Long prompts beside a stream and short prompts, on a worker with the toy engine."""

from __future__ import annotations

import threading

import pytest

from benchmarks.load import fairness
from benchmarks.load.fairness import Cell, Load, measure, slow_downs, table
from redraft.worker.client import WorkerClient
from redraft.worker.server import Worker
from tests.worker.toy_worker import toy_runtime

LOAD = Load(
    long=[[place] * 100 for place in (1, 2)], streamed=["ab", "cd"], short=["x"], long_tokens=3, stream_tokens=30
)


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setattr(fairness, "EVERY_S", 0.01)
    monkeypatch.setattr(fairness, "SETTLE_S", 0.05)
    worker = Worker(toy_runtime(0.005), tmp_path / "worker.sock")
    thread = threading.Thread(target=worker.run)
    thread.start()
    with WorkerClient(tmp_path / "worker.sock") as connected:
        assert connected.wait_connected(60)
        yield connected
    worker.stop()
    thread.join()


def test_everybody_is_served_at_once(client):
    """A count of requests that all ended: none is left running, and a client that fails is said."""
    cells = [measure(client, "now", clients, LOAD) for clients in (0, 1, 2)]
    assert client.status(60).running + client.status(60).waiting == 0
    assert [len(cell.tpot_ms) for cell in cells] == [2, 2, 2]
    assert all(cell.ttft_s and cell.seconds > 0 for cell in cells)
    assert cells[0].long_prompts == 0 < min(cells[1].long_prompts, cells[2].long_prompts)
    totals = client.status(60).totals
    assert totals["requests"] >= sum(2 + len(cell.ttft_s) + cell.long_prompts for cell in cells)
    broken = Load([[1] * 300], LOAD.streamed, LOAD.short, 3, 30)
    with pytest.raises(RuntimeError, match="300 tokens"):
        measure(client, "now", 1, broken)


def test_streams_are_compared_with_one_beside_a_single_long_client_on_the_first_worker():
    cells = [
        Cell("before", 0, [0.1], [5.0], 0, 10.0), Cell("before", 1, [0.1], [10.0, 14.0], 9, 10.0),
        Cell("now", 1, [0.1], [9.0], 9, 10.0),
        Cell("now", 8, [0.1, 0.3, 0.2], [12.0, 18.0], 30, 10.0),
    ]  # fmt: skip
    assert slow_downs(cells) == [5 / 12, 1, 0.75, 1.25]
    assert table(cells).rows[-1] == ["now, 8", "0.20", "0.30", "15.00", "1.25", "3.00"]
    assert slow_downs(cells[:1]) == [None]
