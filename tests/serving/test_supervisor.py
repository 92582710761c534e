"""What a supervisor makes of a worker that drains, without any process."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from redraft.learning.generations import Generation, generation_folder, served_generation
from redraft.serving import supervisor as module
from redraft.serving import tritonserver
from redraft.serving.engine_worker import Swap
from redraft.serving.processes import ServingError
from redraft.serving.rundir import RunDir, SwapOrder, SwapState
from redraft.serving.settings import ServeSettings
from redraft.serving.supervisor import Supervisor
from redraft.worker.client import NOT_THERE
from redraft.worker.protocol import WorkerStatus


@pytest.fixture
def supervisor(tmp_path, monkeypatch) -> Supervisor:
    """One whose worker is up, silent for long, and says that it is not ready."""
    for name in ("supervisor.tritonserver.TritonInstallation", "supervisor.tritonserver.prepare"):
        monkeypatch.setattr(f"redraft.serving.{name}", MagicMock())
    for name in ("command", "environment"):
        monkeypatch.setattr(f"redraft.serving.tritonserver.{name}", MagicMock())
    for name in ("child.Pulse", "supervisor.Pulse", "supervisor.WorkerClient", "supervisor._expect_another_signal"):
        monkeypatch.setattr(f"redraft.serving.{name}", MagicMock())
    made = Supervisor(RunDir(tmp_path), ServeSettings(bundle=Path("b"), openai_port=0))
    made._client.status = lambda _: WorkerStatus(ready=False)
    made._worker.child = MagicMock(up=True, alive=True, age=999.0, pid=0, restarts=0)
    made._worker.child.name = "the engine worker"
    made._worker.pulse = MagicMock(silence=999.0, answered=False)
    made._triton.child = MagicMock(up=True, alive=True, pid=0, restarts=0, hung=lambda *_: "")
    made._guard.child = MagicMock(up=True, alive=True, pid=0, restarts=0, hung=lambda *_: "")
    made._health_pulse = MagicMock()
    return made


def test_a_worker_that_drains_is_away_and_not_hung(supervisor):
    """Somebody else has signalled it. It is killed only where it takes too long."""
    worker = supervisor._worker
    assert not worker._is_ready()
    for _ in range(2):
        supervisor._watch()
        assert not worker.up
        worker.child.end.assert_not_called()
    supervisor._health_pulse.reset.assert_called_once()
    assert supervisor._state.detail == "the engine worker was asked to end, and restarts after its last request"
    worker._ends_by = 0.0
    supervisor._watch()
    worker.child.end.assert_called_once_with(grace=0)


def test_clients_reach_triton_after_the_first_request_only(supervisor, monkeypatch, tmp_path):
    """Its models load beside the worker, and it calls itself ready without one."""
    run_dir, events = RunDir(tmp_path), list[str]()
    run_dir.http_socket.touch()

    def is_open() -> bool:
        assert run_dir.starting.exists() is not run_dir.open_http.exists()
        return run_dir.open_http.exists()

    for part in (supervisor._worker, supervisor._triton, supervisor._guard):
        monkeypatch.setattr(part, "start", lambda: None)
        monkeypatch.setattr(part, "wait", lambda beside: events.append(f"{len(beside)} {is_open()}"))
    monkeypatch.setattr(tritonserver, "remove_memory_after", lambda _: None)
    monkeypatch.setattr(supervisor, "_watch", MagicMock(side_effect=module.StopRequested))
    monkeypatch.setattr(supervisor, "_send_first_requests", lambda: events.append(f"first request {is_open()}"))
    with pytest.raises(module.StopRequested):
        supervisor.run()
    assert events == ["3 False"] * 3 + ["first request False"]
    assert is_open()
    assert run_dir.open_http.samefile(run_dir.http_socket)
    assert (tmp_path / run_dir.open_grpc.readlink()) == run_dir.grpc_socket


@pytest.mark.parametrize(("failure", "asked"), [(NOT_THERE, 3), ("the engine failed", 1)])
def test_models_that_were_there_before_the_worker_may_take_a_moment_to_find_it(supervisor, monkeypatch, failure, asked):
    answers = [ServingError(f"the first request to ensemble failed: {failure}")] * 2 + [None]
    send = MagicMock(side_effect=answers)
    monkeypatch.setattr(tritonserver, "send_first_requests", send)
    supervisor._worker.child.ends_within = lambda _: False
    with nullcontext() if failure == NOT_THERE else pytest.raises(ServingError, match=failure):
        supervisor._send_first_requests()
    assert send.call_count == asked


def test_a_drain_begins_when_health_no_longer_counts_on_the_worker(supervisor, monkeypatch):
    seen = []
    supervisor._worker.child.terminate = lambda: seen.append(
        (supervisor._worker.up, supervisor._health_pulse.reset.called)
    )
    monkeypatch.setattr(module, "_asked_again", True)
    supervisor.shut_down()
    assert seen == [(False, True)]


def test_a_swap_that_a_stop_cuts_short_is_not_left_loading(supervisor, monkeypatch, tmp_path):
    newcomer = MagicMock(alive=True, age=0.0)
    monkeypatch.setattr("redraft.serving.engine_worker.worker_process", lambda *_: newcomer)
    monkeypatch.setattr(Swap, "_ask", lambda _: None)
    supervisor._swap = Swap(RunDir(tmp_path), supervisor._settings, SwapOrder(id="o", bundle=Path("c")), 1)
    monkeypatch.setattr(module, "_asked_again", True)
    supervisor.shut_down()
    newcomer.end.assert_called_once_with(grace=0)
    swap = RunDir(tmp_path).read_state().swap
    assert (swap.phase, swap.error) == ("failed", "the service was stopped")


def test_a_newcomer_takes_its_place_alive_and_keeps_the_count_of_restarts(supervisor, monkeypatch, tmp_path):
    """Where the link to the bundle is gone, the swap fails and the service goes on."""
    newcomer = MagicMock(alive=True, age=0.0, restarts=0, ends_within=lambda _: False)
    monkeypatch.setattr("redraft.serving.engine_worker.worker_process", lambda *_: newcomer)
    monkeypatch.setattr(Swap, "_ask", lambda swap: setattr(swap, "_answered", True))
    run_dir = RunDir(tmp_path)
    swap = Swap(run_dir, supervisor._settings, SwapOrder(id="o", bundle=Path("c")), 1)
    while not swap._answered:
        time.sleep(0.01)
    assert swap.ready
    newcomer.alive = False
    assert not swap.ready
    newcomer.alive = True
    worker = supervisor._worker
    old = worker.child = MagicMock(restarts=3)
    run_dir.bundle.unlink()
    assert not swap.change_places(worker, MagicMock())
    assert "No such file" in swap.failure
    assert worker.child is old
    swap._error = ""
    run_dir.bundle.symlink_to("b")
    assert swap.change_places(worker, MagicMock())
    assert worker.child is newcomer
    assert (newcomer.restarts, worker.up) == (3, True)


def test_going_back_takes_the_last_bundle_off(supervisor, monkeypatch):
    """Two swaps, then one back, which leaves the first bundle to go back to."""
    monkeypatch.setattr(supervisor, "_say_swap", lambda _: None)
    for bundle, back, before in (("c", False, ["b"]), ("d", False, ["b", "c"]), ("c", True, ["b"])):
        order = SwapOrder(id="o", bundle=Path(bundle), back=back)
        swap = MagicMock(ready=True, state=SwapState(order=order), change_places=lambda *_: True)
        swap.settings = supervisor._settings.model_copy(update={"bundle": Path(bundle)})
        supervisor._swap = swap
        supervisor._watch_swap()
        assert supervisor._state.before == list(map(Path, before))


def test_a_swap_is_noted_for_the_next_start_as_it_happens(supervisor, monkeypatch, tmp_path):
    """Also where `redraft swap` was interrupted before its end."""
    monkeypatch.setattr(supervisor, "_say_swap", lambda _: None)
    learned, bundle = tmp_path / "learned", tmp_path / "next"
    bundle.mkdir()
    folder = generation_folder(learned, 3)
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    for place in (folder, bundle):
        Generation(number=3).write(place)
    swap = MagicMock(ready=True, state=SwapState(order=SwapOrder(id="o", bundle=bundle)), change_places=lambda *_: True)
    swap.settings = supervisor._settings.model_copy(update={"bundle": bundle, "learn": learned})
    supervisor._swap = swap
    supervisor._watch_swap()
    assert served_generation(learned) == folder


def test_a_state_that_could_not_be_written_is_written_later(supervisor, tmp_path):
    run_dir = RunDir(tmp_path)
    full = run_dir.state_file.with_suffix(".tmp")
    full.symlink_to("/dev/full")
    supervisor._say("degraded", "the worker died")
    assert run_dir.read_state() is None
    assert not supervisor._saved
    full.unlink()
    supervisor._save()
    assert supervisor._saved
    assert run_dir.read_state().detail == "the worker died"


def test_a_server_without_shared_memory_waits_for_it(supervisor, monkeypatch, tmp_path):
    """It would end as it starts, again and again."""
    server = supervisor._triton.child = MagicMock(up=False, alive=False, pid=0, restarts=0)
    monkeypatch.setattr(tritonserver, "SHARED_MEMORY_BYTES", 2**60)
    supervisor._worker.pulse.silence = 0.0
    supervisor._worker.child.hung = lambda *_: ""
    for _ in range(2):
        supervisor._watch()
    server.start.assert_not_called()
    assert "/dev/shm has no room for Triton's models" in RunDir(tmp_path).read_state().detail
    monkeypatch.setattr(tritonserver, "SHARED_MEMORY_BYTES", 0)
    supervisor._watch()
    server.start.assert_called_once()
