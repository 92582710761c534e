"""The ranks of an engine worker: its processes where a bundle is split over several (tensor parallelism)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from redraft.bound import bound
from redraft.engines.ranks.process import RANK_VARIABLE
from redraft.errors import install
from redraft.serving.processes import ServingError, is_alive

ASCII = "ascii:backslashreplace"
"""What ranks write: at the first other byte `mpiexec.gforker` closes a rank's stdout or stderr for good."""

_ENDS = re.compile(r"^\[\d+\](\d+):Return code = (\d+)(?:, signaled with (.+))?$", re.MULTILINE)
_BAD_END = re.compile(r"^=\s+PID (\d+) RUNNING AT (\S+)\n=\s+EXIT CODE: (\d+)$", re.MULTILINE)
_BY_LAUNCHER = ("was killed (Quit)", "was killed (Interrupt)")


def launch_command(worker: list[str], ranks: int, hostfile: Path | None = None) -> list[str]:
    """`worker` itself for one rank, else the command that starts it `ranks` times: on this machine by a launcher that
    opens no port, on the machines of a hostfile through ssh. Raises ServingError where MPI or the hostfile is missing.
    """
    if ranks == 1:
        if hostfile:
            raise ServingError(f"--hostfile {hostfile}: the bundle is for one rank, which runs on this machine")
        return worker
    launcher = Path(sys.prefix) / "bin" / ("mpiexec" if hostfile else "mpiexec.gforker")
    missing = "mpi4py" if importlib.util.find_spec("mpi4py") is None else "" if launcher.exists() else str(launcher)
    if missing:
        raise ServingError(
            f"the bundle is split over {ranks} ranks, for which MPI is missing ({missing}): {install('ranks')}"
        )
    environment = {"UCX_TLS": os.environ.get("UCX_TLS", "posix,self"), "PYTHONIOENCODING": ASCII}
    options = ["-exitinfo", *(word for pair in environment.items() for word in ("-genv", *pair))]
    if hostfile:
        if not hostfile.is_file():
            raise ServingError(f"--hostfile {hostfile} is not there: expected a file of lines HOST:RANKS")
        options = ["-topolib", "none", "-f", str(hostfile)]
    return bound([str(launcher), *options, "-n", str(ranks), *worker])


def ranks_of(processes: Iterable[psutil.Process]) -> dict[int, psutil.Process]:
    """Return the ranks among a worker's processes. Those on other machines are not among them."""
    by_rank: dict[int, psutil.Process] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error, KeyError):
            rank = int(process.environ()[RANK_VARIABLE])
            # What a rank starts in its turn inherits the variable: the rank itself is the oldest.
            by_rank[rank] = min(by_rank.get(rank, process), process, key=psutil.Process.create_time)
    return dict(sorted(by_rank.items()))


def fallen(ranks: Mapping[int, psutil.Process]) -> list[int]:
    """Return the ranks that have ended."""
    return [rank for rank, process in ranks.items() if not is_alive(process)]


def stopped(ranks: Mapping[int, psutil.Process]) -> list[int]:
    """Return the ranks that a signal or a debugger has stopped."""
    indices = []
    for rank, process in ranks.items():
        with contextlib.suppress(psutil.Error):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                indices.append(rank)
    return indices


def ends_in(log: str, pids: Mapping[int, int]) -> dict[int, str]:
    """Read how ranks ended, by rank, from what the launcher wrote: on one machine all but those that it ended itself,
    across machines the one that took the others with it (-1 where its number is unknown). `pids` are those of this
    machine."""
    ends = {}
    for rank, code, name in _ENDS.findall(log):
        ends[int(rank)] = f"was killed ({name})" if name else f"ended with status {code}"
    # With these two signals the launcher ends ranks that outlive another.
    by_themselves = {rank: how for rank, how in ends.items() if how not in _BY_LAUNCHER}
    for pid, host, code in _BAD_END.findall(log):
        rank = next((rank for rank, rank_pid in pids.items() if rank_pid == int(pid)), -1)
        return {rank: f"on {host} ended (exit status or signal {code})"}
    return by_themselves or ends


def death(fallen: list[int], log: str, pids: Mapping[int, int]) -> dict[int, str]:
    """Return how the ranks ended that are to blame. `fallen` are those that ended while others still ran, if any."""
    ends = ends_in(log, pids)
    if fallen and len(fallen) < len(pids):
        return {rank: ends.get(rank, "ended") for rank in fallen}
    return ends


def describe(ends: Mapping[int, str], pids: Mapping[int, int]) -> str:
    """Write how ranks ended in one line, for logs and the state."""
    named = (f"rank {rank} (pid {pids[rank]})" if rank in pids else "a rank" for rank in ends)
    return "; ".join(f"{name} {how}" for name, how in zip(named, ends.values(), strict=True))
