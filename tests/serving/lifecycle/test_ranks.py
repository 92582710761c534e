"""A worker of two ranks behind Triton: whatever happens to one of them, both end, and a new worker answers.

Slow, as the service starts anew after each fault. It would catch a rank that waits for ever for one that died, one that
leaves shared memory behind, and a supervisor that restarts only one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from redraft.request import GenerateRequest
from redraft.serving import launcher, ranks
from redraft.serving.processes import ServingError, is_alive, owned_processes
from redraft.serving.rundir import State
from redraft.serving.settings import ServeSettings, environment_of
from redraft.worker.client import WorkerClient
from tests.conftest import wait_until
from tests.engines.tiny import random_model, tiny_bundle, tiny_target
from tests.serving.client_side import Service, start
from tests.serving.lifecycle import two_machines
from tests.toy_engine import toy_tokenizer
from tests.worker.toy_worker import wait_for_worker

pytestmark = pytest.mark.slow

START_S = 300
BODY = {"text_input": "What is", "max_tokens": 16, "end_id": -1}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """For two ranks, of 2 and 1 KV groups."""
    config = dataclasses.replace(tiny_target().config, num_heads=6, num_kv_heads=3, intermediate_size=201)
    folder = tmp_path_factory.mktemp("two-ranks")
    return tiny_bundle(
        folder, random_model(config), drafts=False, tensor_parallel=2, tokenizer=toy_tokenizer().to_str()
    ).path


@pytest.fixture(scope="module")
def service(run_folder, bundle) -> Service:
    return start(run_folder, bundle, silence_s=5.0)


def ready(service: Service) -> bool:
    """Triton is told first, the state file is written last. Where one of Triton's model processes crashes (seen twice),
    Triton closes its connections, and the supervisor starts it again."""
    try:
        return service.ready() and service.state.phase == "ready"
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        return False


@pytest.fixture
def two_ranks(service) -> dict[int, psutil.Process]:
    """The processes of a service that is ready; none of them is there after the test, nor any file of theirs."""
    wait_until(lambda: ready(service), timeout=START_S)
    processes = {rank: psutil.Process(pid) for rank, pid in service.state.rank_pids.items()}
    assert set(processes) == {0, 1}
    shared = {
        region.path for process in processes.values() for region in process.memory_maps() if "/dev/shm" in region.path
    }
    assert shared
    assert not any(Path(path).exists() for path in shared), "a rank that is killed would leave it"
    return processes


def killed(rank: int, process: psutil.Process) -> str:
    return f"rank {rank} (pid {process.pid}) was killed (Killed)"


def assert_restarted(service: Service, before: State, rank: int, failure: str, answer: str) -> None:
    """Both ranks are new, the failure is told everywhere, and the answer is the same."""
    wait_until(lambda: not ready(service))
    wait_until(lambda: ready(service), timeout=START_S)
    state = service.state
    wait_until(lambda: not any(map(psutil.pid_exists, before.rank_pids.values())))
    assert state.last_failure == failure
    assert state.worker_restarts == before.worker_restarts + 1
    assert set(state.rank_pids.values()).isdisjoint(before.rank_pids.values())
    assert state.rank_failures[rank] == before.rank_failures.get(rank, 0) + 1
    assert failure in service.run_dir.supervisor_log.read_text()
    wait_until(lambda: service.metrics().get(f'redraft_rank_failures{{rank="{rank}"}}') == state.rank_failures[rank])
    wait_until(lambda: service.metrics()["redraft_worker_restarts"] == state.worker_restarts)
    response = service.generate(BODY)
    assert response.get("text_output") == answer, response


def test_an_idle_rank_is_killed(service, two_ranks):
    answer, before = service.generate(BODY)["text_output"], service.state
    two_ranks[0].kill()
    assert_restarted(service, before, 0, killed(0, two_ranks[0]), answer)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed_in_a_step(service, two_ranks, victim):
    """Rank 1 is stopped, so that the step cannot end, and the supervisor, which does not see that."""
    answer, before = service.generate(BODY)["text_output"], service.state
    answers: list[dict] = []
    supervisor = psutil.Process(before.supervisor_pid)
    supervisor.suspend()
    two_ranks[1].suspend()
    request = threading.Thread(target=lambda: answers.append(service.generate(BODY)))
    request.start()
    idle = sum(two_ranks[0].cpu_times()[:2])
    wait_until(lambda: sum(two_ranks[0].cpu_times()[:2]) > idle + 0.03)
    two_ranks[victim].kill()
    supervisor.resume()
    request.join(60)
    assert "worker went away" in answers[0]["error"]
    assert_restarted(service, before, victim, killed(victim, two_ranks[victim]), answer)


def test_a_rank_is_stopped(service, two_ranks):
    answer, before = service.generate(BODY)["text_output"], service.state
    two_ranks[1].suspend()
    assert "worker went away" in service.generate(BODY)["error"]
    assert_restarted(service, before, 1, f"rank 1 (pid {two_ranks[1].pid}) is stopped", answer)


def test_the_launcher_is_killed(service, two_ranks):
    restarts = service.state.worker_restarts
    two_ranks[1].suspend()
    psutil.Process(service.state.worker_pid).kill()
    wait_until(lambda: not any(map(is_alive, two_ranks.values())))
    wait_until(lambda: ready(service) and service.state.worker_restarts == restarts + 1, timeout=START_S)
    assert "text_output" in service.generate(BODY)


def test_idle_ranks_rest(service, two_ranks):
    before = {rank: sum(process.cpu_times()[:2]) for rank, process in two_ranks.items()}
    time.sleep(2.0)
    for rank, process in two_ranks.items():
        used = sum(process.cpu_times()[:2]) - before[rank]
        assert used < 0.1, f"rank {rank} works {used:.2f} s of 2 while there is nothing to do"


def test_only_loopback_is_bound(service, two_ranks):
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in owned_processes(service.run_dir.path)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


@pytest.fixture
def machines() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(two_machines.two_machines())
        except two_machines.NoNamespacesError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield


@pytest.mark.parametrize("victim", [0, 1])
def test_across_machines(service, two_ranks, machines, bundle, tmp_path, victim):
    """The text is that of one machine; it went through the cable; the death of either rank ends all."""
    expected = service.generate(BODY)["text_output"]
    with two_machines.worker_on(bundle, tmp_path) as remote:
        pids = {rank: process.pid for rank, process in remote.ranks.items()}
        before = two_machines.bytes_through_the_cable()
        assert remote.answer(BODY["text_input"], BODY["max_tokens"]) == expected
        assert two_machines.bytes_through_the_cable() - before > BODY["max_tokens"] * 4 * 111 / 2, "rank 1's logits"
        assert two_machines.seconds_to_end(remote, victim) < 5
        blamed = ranks.describe(ranks.death([], remote.log_file.read_text(), pids), pids)
        host = list(two_machines.HOSTS.values())[victim]
        assert blamed == f"rank {victim} (pid {pids[victim]}) on {host} ended (exit status or signal 9)"


def test_no_rank_outlives_the_supervisor(service, two_ranks):
    """Not even where one is stopped, and the other waits for it in a step."""
    two_ranks[1].suspend()

    def send() -> None:
        with pytest.raises(httpx.HTTPError):
            service.generate(BODY)

    request = threading.Thread(target=send)
    request.start()
    psutil.Process(service.state.supervisor_pid).kill()
    wait_until(lambda: not any(map(is_alive, two_ranks.values())))
    request.join(60)
    launcher.stop(service.run_dir.path)
    assert owned_processes(service.run_dir.path) == []


def test_a_rank_that_finds_no_bundle_ends_all(bundle, tmp_path):
    program = f"""
import os, sys
from redraft.worker.server import main
sys.exit(main(["--bundle", "nowhère" if os.environ["PMI_RANK"] == "1" else {str(bundle)!r}, "--socket", "unused"]))
"""
    command = ranks.launch_command([sys.executable, "-c", program], 2)
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert r"redraft worker: nowh\xe8re does not exist" in done.stderr, "a byte beyond ASCII ends it all"
    wait_until(lambda: set(Path("/dev/shm").glob("mpich_shm_*")) <= before)


def test_a_stop_lets_a_request_of_all_ranks_end(bundle, tmp_path):
    """The launcher passes SIGTERM to both: one that ended at once would leave the other in the next step for ever."""
    socket = tmp_path / "w.sock"
    worker = [sys.executable, "-m", "redraft.worker.server", "--bundle", str(bundle), "--socket", str(socket)]
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    process = subprocess.Popen(
        ranks.launch_command(worker, 2), env=environment_of(ServeSettings(drain_s=60)), stdin=subprocess.DEVNULL
    )
    try:
        most = wait_for_worker(socket, START_S).limits["max_len"] - 16
        with WorkerClient(socket) as client:
            assert client.wait_connected(60)
            wanted = GenerateRequest(id="r", text=BODY["text_input"], max_tokens=most, end_id=-1, stream=True)
            running = client.generate(wanted, timeout=60)
            next(running)
            process.terminate()
            last = list(running)[-1]
        assert (last.finish_reason, last.stats.output_tokens) == ("length", most)
        assert process.wait(60) == 0
        wait_until(lambda: set(Path("/dev/shm").glob("mpich_shm_*")) <= before)
    finally:
        process.kill()


def split(folder: Path, count: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"tensor_parallel": count}))
    return folder


def test_without_mpi(tmp_path, monkeypatch):
    wanted = ServeSettings(bundle=split(tmp_path / "bundle", 2))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ServingError, match=r"2 ranks, .*MPI is missing .*mpiexec.gforker\): pip install .*ranks"):
        launcher.serve(wanted, tmp_path / "run", print)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ServingError, match=r"MPI is missing \(mpi4py\)"):
        launcher.serve(wanted, tmp_path / "run", print)


def test_a_hostfile_that_cannot_be_used(tmp_path):
    with pytest.raises(ServingError, match=r"hosts is not there: expected a file of lines HOST:RANKS"):
        ranks.launch_command([], 2, tmp_path / "hosts")
    with pytest.raises(ServingError, match=r"--hostfile .*: the bundle is for one rank"):
        ranks.launch_command([], 1, tmp_path / "hosts")


ONE_MACHINE = """
rank 1 talks
[0]0:Return code = 0, signaled with Quit
[0]1:Return code = 3
[0]2:Return code = 0, signaled with Segmentation fault
"""
SEVERAL_MACHINES = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 77 RUNNING AT node1
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
"""


def test_how_ranks_ended_on_one_machine():
    pids = {0: 10, 1: 11, 2: 12}
    assert ranks.death([], ONE_MACHINE, pids) == {1: "ended with status 3", 2: "was killed (Segmentation fault)"}
    assert ranks.death([2], ONE_MACHINE, pids) == {2: "was killed (Segmentation fault)"}, "seen to end first"
    assert ranks.death([1], "", pids) == {1: "ended"}
    all_quit = "[0]0:Return code = 0, signaled with Quit\n[0]1:Return code = 0, signaled with Quit"
    assert ranks.death([], all_quit, pids) == {0: "was killed (Quit)", 1: "was killed (Quit)"}


def test_how_a_rank_ended_on_another_machine():
    """MPI's launcher tells a signal from a status on one machine only."""
    how = "on node1 ended (exit status or signal 9)"
    assert ranks.describe(ranks.death([], SEVERAL_MACHINES, {0: 10}), {0: 10}) == f"a rank {how}"
    assert ranks.describe(ranks.death([], SEVERAL_MACHINES, {0: 77}), {0: 77}) == f"rank 0 (pid 77) {how}"
    assert ranks.death([], "no word of it", {0: 10}) == {}
