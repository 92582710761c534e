"""Two machines on one: a worker's ranks in two network namespaces, joined by a virtual cable. Needs root and `ip`.

In place of ssh there is a script that enters the namespace; transports other than TCP are off, so that nothing goes
by shared memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from redraft.engines.ranks.process import RANK_VARIABLE
from redraft.request import GenerateRequest
from redraft.serving.processes import is_alive
from redraft.serving.ranks import launch_command
from redraft.worker.client import WorkerClient
from tests.worker.toy_worker import wait_for_worker

HOSTS = {"redraft-a": "10.203.77.1", "redraft-b": "10.203.77.2"}
CABLE = ("redraft0", "redraft1")
INSIDE = ["ip", "netns", "exec", next(iter(HOSTS))]
"""Runs a command on the first machine."""
START_S = 180
SSH = """#!/bin/sh
# In the place of ssh: [-x] HOST COMMAND...
[ "$1" = -x ] && shift
case $1 in {cases} *) echo "no such host: $1" >&2; exit 255 ;; esac
shift
exec ip netns exec $space sh -c "$*"
"""


class NoNamespacesError(RuntimeError):
    """Network namespaces cannot be made here; the text says what is missing."""


def _ip(*arguments: str, check: bool = True) -> None:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise NoNamespacesError("`ip` is missing (Debian: apt-get install iproute2)") from None
    if check and done.returncode:
        said = " ".join(done.stderr.split())
        raise NoNamespacesError(f"`ip {' '.join(arguments)}` needs CAP_SYS_ADMIN and CAP_NET_ADMIN, and says: {said}")


@contextlib.contextmanager
def two_machines() -> Iterator[None]:
    """The namespaces with their cable. Raises NoNamespacesError where they cannot be made."""
    _clear()
    try:
        for space in HOSTS:
            _ip("netns", "add", space)
        _ip("link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1])
        for (space, address), end in zip(HOSTS.items(), CABLE, strict=True):
            _ip("link", "set", end, "netns", space)
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", space, "link", "set", end, "up")
            _ip("-n", space, "link", "set", "lo", "up")
        yield
    finally:
        _clear()


def _clear() -> None:
    for space in HOSTS:
        _ip("netns", "delete", space, check=False)


@dataclass
class RemoteWorker:
    """A worker whose rank 1 runs on the other machine."""

    launcher: subprocess.Popen[bytes]
    socket: Path
    log_file: Path

    @property
    def ranks(self) -> dict[int, psutil.Process]:
        """Both ranks: the machines are one after all."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if RANK_VARIABLE in environment and str(self.socket) in process.cmdline() and is_alive(process):
                    found[int(environment[RANK_VARIABLE])] = process
        return found

    def answer(self, prompt: str, max_tokens: int) -> str:
        with WorkerClient(self.socket) as client:
            assert client.wait_connected(60)
            request = GenerateRequest(id=client.new_id(), text=prompt, max_tokens=max_tokens, end_id=-1)
            return client.complete(request, timeout=60).text


def joined(folder: Path) -> tuple[Path, dict[str, str]]:
    """A hostfile of both machines, and the environment in which MPI reaches them over the cable alone."""
    hostfile, ssh = folder / "hosts", folder / "ssh"
    hostfile.write_text("".join(f"{address}:1\n" for address in HOSTS.values()))
    ssh.write_text(SSH.format(cases=" ".join(f"{address}) space={space} ;;" for space, address in HOSTS.items())))
    ssh.chmod(0o755)
    return hostfile, {"HYDRA_LAUNCHER_EXEC": str(ssh), "HYDRA_IFACE": CABLE[0], "UCX_TLS": "tcp,self"}


@contextlib.contextmanager
def worker_on(bundle: Path, folder: Path) -> Iterator[RemoteWorker]:
    """Rank 0 in the first namespace, rank 1 in the second."""
    socket, (hostfile, network) = folder / "worker.sock", joined(folder)
    worker = [sys.executable, "-m", "redraft.worker.server", "--bundle", str(bundle), "--socket", str(socket)]
    command = [*INSIDE, *launch_command(worker, 2, hostfile)]
    log_file = folder / "worker.log"
    with log_file.open("wb") as log:
        launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | network, start_new_session=True
        )
    remote = RemoteWorker(launcher, socket, log_file)
    try:
        deadline = time.monotonic() + START_S
        while not socket.exists():
            assert launcher.poll() is None, log_file.read_text()
            assert time.monotonic() < deadline, f"not up within {START_S} s"
            time.sleep(0.1)
        wait_for_worker(socket, START_S)
        yield remote
    finally:
        ranks = remote.ranks
        launcher.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(10)
        launcher.kill()
        for process in ranks.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def bytes_through_the_cable() -> int:
    """Received at its first end since it was laid."""
    return int(subprocess.check_output([*INSIDE, "cat", f"/sys/class/net/{CABLE[0]}/statistics/rx_bytes"]))


def seconds_to_end(remote: RemoteWorker, victim: int, timeout: float = 30) -> float:
    """Kill a rank; how long the launcher and all ranks take to end after it."""
    ranks = remote.ranks
    ranks[victim].kill()
    began = time.monotonic()
    while remote.launcher.poll() is None or any(map(is_alive, ranks.values())):
        assert time.monotonic() < began + timeout, f"not ended {timeout} s after rank {victim}'s death"
        time.sleep(0.02)
    return time.monotonic() - began
