"""A worker as a decoder in a comparison: the same answers and clock as in this process; a worker that ends is said."""

import threading

import pytest

from benchmarks.load.served import Served, worker_of
from redraft.request import AUTO_REGRESSIVE, request
from redraft.worker.client import WorkerClient
from redraft.worker.server import Worker
from tests.worker.toy_worker import toy_runtime


@pytest.fixture
def client(tmp_path):
    worker = Worker(toy_runtime(0.005), tmp_path / "worker.sock")
    thread = threading.Thread(target=worker.run)
    thread.start()
    with WorkerClient(tmp_path / "worker.sock") as connected:
        assert connected.wait_connected(60)
        yield connected
    worker.stop()
    thread.join()


def test_answers_and_clock_are_those_of_the_worker(client):
    (method,) = toy_runtime().plans
    asked = [request("to be", 20, temperature=0.0), request("not", 30, temperature=0.0)]
    plain, plain_clock = Served(client, AUTO_REGRESSIVE).run(asked)
    drafted, clock = Served(client, method).run(asked)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    assert plain_clock.steps > clock.steps > 0
    assert plain_clock.draft_s == 0 < clock.draft_s
    assert clock.target_s >= clock.steps * 0.005
    assert clock.wall_s > clock.step_s > clock.target_s
    assert clock.wall_s >= sum(answer.seconds for answer in drafted) > clock.target_s


def test_a_worker_that_cannot_load_ends_with_its_reason(tmp_path, capfd):
    with pytest.raises(RuntimeError, match="ended with status 2"), worker_of(tmp_path / "none"):
        pytest.fail("no worker is there")
    assert str(tmp_path / "none") in capfd.readouterr().err
