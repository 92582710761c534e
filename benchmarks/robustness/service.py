"""A running service as the robustness scripts see it: its processes, what they hold, and streams over each protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import typer

from redraft.loadtest.clients.base import Client, Generation
from redraft.loadtest.clients.connect import connect
from redraft.serving.processes import SHARED_MEMORY, owned_processes, shared_memory_prefix
from redraft.serving.rundir import RunDir, State
from redraft.serving.settings import ServeSettings

LAUNCHER = "launcher of the ranks"
PROTOCOLS = ("http", "grpc", "openai")
HANG_S = 90.0
"""Neither ended nor closed for so long is a hang: thrice what a body may take."""


def read_state(run_dir: RunDir) -> State:
    """Return the state of a service that is ready. Raises typer.BadParameter for any other."""
    state = run_dir.read_state()
    if state is None or state.phase != "ready" or not state.settings.openai_port:
        raise typer.BadParameter(f"no service with /v1 is ready at {run_dir.path}: start one with `redraft serve`")
    return state


def worker_name(ranks: int) -> str:
    """What the worker's process does: where a bundle is for several ranks, it only starts them."""
    return LAUNCHER if ranks > 1 else "worker"


def processes(state: State) -> dict[str, psutil.Process]:
    """The processes of a service by what they do, the supervisor last."""
    pids = {"guard": state.guard_pid, "/v1 front end": state.openai_pid, "Triton server": state.triton_pid}
    with contextlib.suppress(psutil.Error, IndexError):  # a process that ends has no command line
        for model in psutil.Process(state.triton_pid).children():
            pids[f"model {Path(model.cmdline()[1]).parents[1].name}"] = model.pid
    if len(state.rank_pids) > 1:
        pids |= {f"rank {rank}": pid for rank, pid in state.rank_pids.items()}
    result = {}
    pids |= {worker_name(len(state.rank_pids)): state.worker_pid, "supervisor": state.supervisor_pid}
    for name, pid in pids.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            result[name] = psutil.Process(pid)
    return result


def orphans(run_dir: Path, supervisor: int) -> list[str]:
    """The service's processes that do not descend from its supervisor."""
    try:
        ours = {supervisor, *(child.pid for child in psutil.Process(supervisor).children(recursive=True))}
    except psutil.NoSuchProcess:
        ours = set()
    return [str(process) for process in owned_processes(run_dir) if process.pid not in ours]


def mpi_memory() -> set[str]:
    """MPI's files in /dev/shm, whoever made them."""
    return set(map(str, SHARED_MEMORY.glob("mpich_shm_*")))


def leaked_memory(run_dir: Path, ranks: int, others: set[str]) -> list[str]:
    """The service's files in /dev/shm that no process of its maps; with several ranks MPI's too, but for those of
    `others`, which were there before."""
    mapped = set()
    for process in owned_processes(run_dir):
        with contextlib.suppress(psutil.Error):
            mapped |= {region.path for region in process.memory_maps()}
    files = set(map(str, SHARED_MEMORY.glob(f"{shared_memory_prefix(run_dir)}*")))
    if ranks > 1:
        files |= mpi_memory() - others
    return sorted(files - mapped)


@asynccontextmanager
async def connected(settings: ServeSettings) -> AsyncIterator[Mapping[str, Client]]:
    """A client of each protocol."""
    ports = {"http": settings.http_port, "grpc": settings.grpc_port, "openai": settings.openai_port}
    clients = {name: await connect(name, f"127.0.0.1:{port}", None, None) for name, port in ports.items()}
    try:
        yield clients
    finally:
        for client in clients.values():
            await client.close()


async def text(client: Client, generation: Generation, pieces: int | None = None) -> str:
    """A stream's text; after so many pieces it is cancelled. Raises GenerationError, and TimeoutError for a hang."""
    got: list[str] = []
    async with asyncio.timeout(HANG_S):
        stream = client.stream(generation)
        async for piece in stream:
            got.append(piece.text)
            if len(got) == pieces:
                await stream.aclose()  # type: ignore[attr-defined]
                break
    return "".join(got)


def generations(count: int, tokens: int) -> Iterator[Generation]:
    """Different requests, greedy and sampled with a seed in turn."""
    for number in range(count):
        sampling = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}  # on /v1 1 is usual
        prompt = f"{_TASKS[number % len(_TASKS)]} {_TOPICS[number // len(_TASKS) % len(_TOPICS)]}:"
        yield Generation(prompt, tokens, sampling)


_TASKS = ("A short history of", "Ten facts about", "How to explain to a child", "A letter to a friend about")
_TOPICS = ("the steam engine", "bread", "the moon", "tides", "a good bridge", "paper")
