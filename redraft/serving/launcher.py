"""Start and stop a service from the command line."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from redraft.bundle.folder import bundle_ranks
from redraft.console.progress import size
from redraft.console.resources import host_bytes
from redraft.errors import BundleError, reason, why_no_folder
from redraft.home import SITE
from redraft.operator_build import build_operators
from redraft.plugins.library import BuildError, are_built, check_build
from redraft.serving.processes import (
    OWNER_VARIABLE,
    PART_VARIABLE,
    WORKER_PART,
    ServingError,
    check_port,
    check_room,
    end_processes,
    is_alive,
    owned_processes,
    remove_shared_memory,
)
from redraft.serving.ranks import launch_command
from redraft.serving.rundir import RunDir, State, SwapOrder, cannot_write, check_text, tail
from redraft.serving.settings import ServeSettings, flag
from redraft.serving.tritonserver import TritonInstallation, check_shared_memory

STOP_S = 25.0
"""A supervisor takes at most so long to begin to end all, and to end it after its requests have ended or
`ServeSettings.drain_s` is over."""
FREED_S = 3.0
"""What was killed a moment ago is no longer listed, but holds ports and locks until its last thread has ended."""
DISK_BYTES = 4 * 2**20
"""The run directory needs some hundred kilobytes to start, and logs grow."""
READ_AHEAD_BYTES = 2**17
_POLL_S, LOG_POLL_S = 0.05, 0.5
_SWAPPING = {
    "loading": "loading {} beside the bundle that serves",
    "draining": "new requests go to {}, running ones end on the old bundle",
}


def check(settings: ServeSettings, run_path: Path) -> None:
    """Raises ServingError where a service with these settings could not start now, whatever the bundle that is yet to
    be made: after hours of that it would be late to say so."""
    run_dir = RunDir(run_path)
    launch_command([], settings.tp, settings.hostfile)
    _check_folders(settings)
    _check_answers(settings)
    try:
        check_build()
    except BuildError as error:
        raise ServingError(str(error)) from None
    _check_machine(run_dir)
    with _launching(run_dir), _private():
        _make_way(settings, run_dir)


def serve(settings: ServeSettings, run_path: Path, on_progress: Callable[[str], None]) -> State:
    """Start a service and return when a real request has succeeded. `on_progress` is told each new activity.

    Raises ServingError, and KeyboardInterrupt passes through; in both cases nothing is left running.
    """
    run_dir = RunDir(run_path)
    settings = settings.model_copy(
        update={
            "bundle": settings.bundle.resolve(),
            "learned_dir": settings.learned_dir and settings.learned_dir.resolve(),
            "served_dir": settings.served_dir and settings.served_dir.resolve(),
            "learn": settings.learn and settings.learn.resolve(),
            "hostfile": settings.hostfile and settings.hostfile.resolve(),
        }
    )
    _check_answers(settings)
    _check_bundle(settings)
    _check_machine(run_dir)
    if settings.hostfile is None:  # other machines read the files of their ranks
        threading.Thread(target=_read_ahead, args=[settings.bundle], name="redraft-read-ahead", daemon=True).start()
    with _launching(run_dir), _private():
        _make_way(settings, run_dir)
        _write_settings(settings, run_dir)
        _compile_operators(on_progress)
        try:
            return _follow(run_dir, _start_supervisor(run_dir), on_progress)
        except BaseException:
            end(run_path)
            raise


def end(run_path: Path, only_own: bool = False) -> None:
    """Stop the service, or only if this process has started it. Whatever interrupts come meanwhile: each one only stops
    it faster, as a second `stop` does. Raises ServingError as `stop` does."""
    wanted = not only_own
    while True:
        try:
            # Asked once: a supervisor that an interrupted stop has ended is nobody's, and its parts may be left.
            wanted = wanted or _is_own(run_path)
            if wanted:
                stop(run_path)
            return
        except KeyboardInterrupt:
            continue


def _is_own(run_path: Path) -> bool:
    state = RunDir(run_path).read_state()
    with contextlib.suppress(psutil.NoSuchProcess):
        return state is not None and psutil.Process(state.supervisor_pid).ppid() == os.getpid()
    return False


def stop(run_path: Path) -> int:
    """End the service of a run directory, whatever state it is in. Returns how many processes it had.

    Running requests end first, for at most `ServeSettings.drain_s`; called again meanwhile, at once. A supervisor that
    hangs is killed.
    Afterwards no process and no shared memory of it is left, also when parts of it had been killed. Raises
    ServingError where the run directory cannot be used.
    """
    run_dir = RunDir(run_path)
    _check_owner(run_dir)
    processes = owned_processes(run_dir.path)
    state = run_dir.read_state()
    for process in processes:
        if state and process.pid == state.supervisor_pid:
            _end_supervisor(run_dir, process)
    for _ in range(2):  # the second time for what they started while they were looked for
        end_processes(owned_processes(run_dir.path), grace=0)
    remove_shared_memory(run_dir.path)
    try:
        run_dir.remove_sockets()
    except OSError as error:
        raise _unusable(run_dir, error) from None
    state = run_dir.read_state()
    if state and state.phase not in ("stopped", "failed"):
        with contextlib.suppress(OSError), _private():
            run_dir.write_state(state.model_copy(update={"phase": "stopped", "detail": ""}))
    return len(processes)


def swap(bundle: Path | None, run_path: Path, on_progress: Callable[[str], None]) -> State:
    """Have the service of a run directory serve another bundle, None: the one that it served before, without losing a
    request. Returns when the old bundle's last request has ended; `on_progress` is told each new activity.

    Raises ServingError where that is not possible: the old bundle serves on. KeyboardInterrupt passes through, and the
    swap goes on.
    """
    run_dir, back = RunDir(run_path), bundle is None
    if not is_running(run_dir):
        raise ServingError(f"no service is running from {run_dir.path}: `redraft serve` starts one")
    with _launching(run_dir), _private():
        state = run_dir.read_state()
        if state is None or state.phase not in ("ready", "degraded"):
            raise ServingError("the service is starting or stopping: try again when it is ready")
        if state.swap and state.swap.phase in ("loading", "draining"):
            raise ServingError(f"a swap to {state.swap.order.bundle} is under way: `redraft status` says how it is")
        if bundle is None:
            if not state.before:
                raise ServingError(f"nothing was served before {state.settings.bundle}: expected --bundle or --drafter")
            bundle = state.before[-1]
        bundle = bundle.resolve()
        _check_bundle(state.settings.model_copy(update={"bundle": bundle}))
        _check_tokenizer(bundle, state.settings.bundle)
        _check_memory(bundle, state, run_dir)
        order = SwapOrder(id=uuid.uuid4().hex, bundle=bundle, back=back)
        try:
            run_dir.write_order(order)
        except OSError as error:
            raise cannot_write(run_dir.swap_order, error) from None
        return _follow_swap(run_dir, order, on_progress)


def stay(run_path: Path, on_text: Callable[[str], None]) -> str:
    """Pass the logs of a running service on until it ends; end it at KeyboardInterrupt, at once at a second one.
    Returns why it ended by itself, "" where it was asked to."""
    run_dir = RunDir(run_path)
    files = (run_dir.supervisor_log, run_dir.worker_log, run_dir.triton_log, run_dir.guard_log, run_dir.openai_log)
    logs = dict.fromkeys(files, 0)
    asked = False
    try:
        while is_running(run_dir):
            _pass_on(logs, on_text)
            time.sleep(LOG_POLL_S)
    except KeyboardInterrupt:
        asked = True
    state = run_dir.read_state()
    end(run_path)
    _pass_on(logs, on_text)
    if asked or (state and state.phase == "stopped"):
        return ""
    return (state.error if state else "") or "the supervisor was killed"


def _pass_on(logs: dict[Path, int], on_text: Callable[[str], None]) -> None:
    """Write what is new in the logs; `logs` has how far each has been read."""
    for log, start in logs.items():
        with contextlib.suppress(OSError), log.open("rb") as file:
            if file.seek(0, os.SEEK_END) < start:
                start = 0  # a new log: the old one was full
            file.seek(start)
            if new := file.read():
                logs[log] = start + len(new)
                on_text(new.decode(errors="replace"))


def _follow_swap(run_dir: RunDir, order: SwapOrder, on_progress: Callable[[str], None]) -> State:
    last_phase, begun = "", time.monotonic()
    while is_running(run_dir):
        state = run_dir.read_state()
        swap = state.swap if state else None
        if state and swap and swap.order == order:
            if swap.phase == "done" and state.phase not in ("stopping", "stopped"):
                return state
            if swap.phase == "failed":
                raise ServingError(swap.error)
            if swap.phase != last_phase:
                last_phase = swap.phase
                on_progress(_SWAPPING[swap.phase].format(order.bundle.name))
        elif time.monotonic() > begun + STOP_S:
            run_dir.swap_order.unlink(missing_ok=True)
            raise ServingError(f"the supervisor does not take the order: {run_dir.supervisor_log} may say why")
        time.sleep(_POLL_S)
    raise ServingError("the service has ended meanwhile")


def _check_tokenizer(bundle: Path, served: Path) -> None:
    """Raises ServingError where token ids would mean something else: clients of `tensorrt_llm` send them."""
    if _tokenizer(bundle) != _tokenizer(served):
        raise ServingError(
            f"{bundle} has another tokenizer than {served}, so it is another model to its clients: serve it from "
            "another --run-dir, on other ports, and let them choose"
        )


def _tokenizer(bundle: Path) -> bytes | None:
    """The content of a bundle's tokenizer.json, None where it has none."""
    with contextlib.suppress(FileNotFoundError):
        return (bundle / "tokenizer.json").read_bytes()
    return None


def _check_memory(bundle: Path, state: State, run_dir: RunDir) -> None:
    """Raises ServingError where the machine has too little memory for a second worker: one that is as large as the one
    that serves, or larger by as much as its bundle's files are."""
    sizes = [
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        for folder in (bundle, state.settings.bundle)
    ]
    needed = 0.0
    for process in owned_processes(run_dir.path):
        with contextlib.suppress(psutil.Error):
            if (process.environ().get(PART_VARIABLE) or "").startswith(WORKER_PART):
                needed += process.memory_info().rss
    needed *= max(1.0, sizes[0] / max(sizes[1], 1))
    if needed > (free := host_bytes()):
        raise ServingError(
            f"both workers would not fit into memory: the new one needs about {size(needed)}, {size(free)} are free. "
            "Without a swap: `redraft stop`, then `redraft serve`"
        )


def _end_supervisor(run_dir: RunDir, supervisor: psutil.Process) -> None:
    """Send SIGTERM, and SIGKILL after STOP_S, or later by `drain_s` where the supervisor says that it is stopping."""
    begun = time.monotonic()
    with contextlib.suppress(psutil.NoSuchProcess):
        supervisor.terminate()
    while is_alive(supervisor):
        state = run_dir.read_state()
        drain_s = state.settings.drain_s if state and state.phase == "stopping" else 0.0
        if time.monotonic() > begun + STOP_S + drain_s:
            break
        time.sleep(_POLL_S)
    end_processes([supervisor], grace=0)


def is_running(run_dir: RunDir) -> bool:
    """Whether a supervisor holds the run directory. Raises ServingError where this user may not look into it."""
    _check_owner(run_dir)
    try:
        with run_dir.lock_file.open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unusable(run_dir, error) from None
    return False


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """Only this user can read what is made meanwhile, by the processes that are started too: the files, sockets and
    shared memory of a service hold prompts."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def _launching(run_dir: RunDir) -> Iterator[None]:
    """Hold the run directory while a service starts or swaps its bundle. Raises ServingError while another launcher
    does."""
    folder = os.open(run_dir.path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServingError(
                f"another `redraft serve` or `redraft swap` is at work in {run_dir.path}: wait until it has ended, or "
                "choose another directory with --run-dir, and other ports"
            ) from None
        yield
    finally:
        os.close(folder)


def _check_owner(run_dir: RunDir) -> None:
    """Raises ServingError for the run directory of another user, unless this one is root."""
    try:
        owner = run_dir.path.stat().st_uid
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(run_dir, error) from None
    if os.geteuid() not in (0, owner):
        raise ServingError(
            f"cannot use the run directory {run_dir.path}: it belongs to another user, and only that user sees and "
            "stops its service; choose another with --run-dir"
        )


def _unusable(run_dir: RunDir, error: OSError) -> ServingError:
    return ServingError(f"cannot use the run directory {run_dir.path}: {error.strerror}; choose another with --run-dir")


def _check_bundle(settings: ServeSettings) -> None:
    check_text(settings.bundle, "bundle")
    _check_folders(settings)
    if settings.hostfile:
        check_text(settings.hostfile, "hostfile")
    if not (settings.bundle / "config.json").is_file():
        raise ServingError(f"{settings.bundle} is not a bundle: it has no config.json; `redraft build` builds one")
    launch_command([], bundle_ranks(settings.bundle), settings.hostfile)
    if settings.learn:
        from redraft.learning.answers import why_nothing_to_learn  # a start without it does not wait for the import

        try:
            if why := why_nothing_to_learn(settings.bundle):
                raise ServingError(f"--learn {settings.learn}: {why}")
        except BundleError as error:
            raise ServingError(str(error)) from None


def _make_private(folder: Path) -> None:
    """Make the folder of --learn, for this user only. Raises ServingError where it cannot be made or written to, or is
    there and open to others."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        raise ServingError(f"--learn {folder}: {reason(error)}") from None
    if mode & 0o077:
        raise ServingError(
            f"--learn {folder} is open to other users, and answers are private: `chmod 700` it, or name a folder in it"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ServingError(f"--learn {folder}: this user cannot write to it")


def _check_answers(settings: ServeSettings) -> None:
    """Raises ServingError where the folder of --learn has shards that no service stored."""
    if settings.learn:
        from redraft.learning.answers import why_not_stored  # a start without it does not wait for the import

        try:
            if why := why_not_stored(settings.learn):
                raise ServingError(f"--learn {settings.learn}: {why}")
        except OSError as error:
            raise ServingError(f"--learn {settings.learn}: {reason(error)}") from None


def _check_folders(settings: ServeSettings) -> None:
    """Raises ServingError where what is learned, texts or answers cannot be kept where they are told, which the worker
    would only log."""
    for name, what in (
        ("learned_dir", "folder of what was learned"),
        ("served_dir", "folder of served texts"),
        ("learn", "folder of answers"),
    ):
        folder = getattr(settings, name)
        if folder is None:
            continue
        check_text(folder, what)
        if fault := why_no_folder(folder):
            raise ServingError(f"{flag(name)} {folder}: {fault}")
    if settings.learn:
        _make_private(settings.learn)


def _compile_operators(on_progress: Callable[[str], None]) -> None:
    """Compile what the worker would compile: that may take longer than a worker may take to start. Raises
    ServingError."""
    if are_built():
        return
    on_progress("compiling the CPU operators, once for this version")
    try:
        build_operators()
    except BuildError as error:
        raise ServingError(str(error)) from None


def _read_ahead(bundle: Path) -> None:
    """Have the system read a bundle's files while the service's processes import their modules. Files that would fill
    the memory are left out: the first would be gone when the worker reads them."""
    with contextlib.suppress(OSError):  # the worker says what is wrong with the bundle
        files = [path for path in bundle.rglob("*") if path.is_file()]
        sizes = [path.stat().st_size for path in files]
        if 2 * sum(sizes) > host_bytes():
            return
        for path, length in zip(files, sizes, strict=True):
            with path.open("rb") as file:
                # Linux reads no more than a part of what one call asks for.
                for start in range(0, length, READ_AHEAD_BYTES):
                    os.posix_fadvise(file.fileno(), start, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)


def _check_machine(run_dir: RunDir) -> None:
    """Raises ServingError where Triton is missing or the run directory cannot be used."""
    TritonInstallation()
    try:
        run_dir.create()
    except OSError as error:
        raise _unusable(run_dir, error) from None


def _make_way(settings: ServeSettings, run_dir: RunDir) -> None:
    """End what a killed service has left. Raises ServingError where another runs, or a port or memory is taken."""
    _check_free(run_dir)
    stop(run_dir.path)
    _check_ports(settings)
    check_shared_memory()


def _check_free(run_dir: RunDir) -> None:
    """Raises ServingError while a supervisor holds the run directory: one that was killed does for a moment."""
    deadline = time.monotonic() + FREED_S
    while is_running(run_dir):
        state = run_dir.read_state()
        alive = state and any(process.pid == state.supervisor_pid for process in owned_processes(run_dir.path))
        if alive or time.monotonic() > deadline:
            raise ServingError(f"a service is running from {run_dir.path}: `redraft stop` ends it")
        time.sleep(_POLL_S)


def _check_ports(settings: ServeSettings) -> None:
    ports = {"HTTP": settings.http_port, "gRPC": settings.grpc_port, "metrics": settings.metrics_port}
    if settings.openai_port:
        ports["OpenAI"] = settings.openai_port
    if len(set(ports.values())) < len(ports):
        listing = ", ".join(f"{purpose} {port}" for purpose, port in ports.items())
        raise ServingError(f"the ports are {listing}: expected different ones")
    deadline = time.monotonic() + FREED_S
    for purpose, port in ports.items():
        while True:
            try:
                check_port(port, purpose, f"--{purpose.lower()}-port")
                break
            except ServingError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)


def _write_settings(settings: ServeSettings, run_dir: RunDir) -> None:
    """Leave the settings to the supervisor, in a directory without the last service's logs and state."""
    try:
        limited = (run_dir.triton_log, run_dir.guard_log, run_dir.openai_log)
        full = [log for file in limited for log in run_dir.path.glob(f"{file.name}*")]  # with what was moved to `.1`
        for old in (run_dir.worker_log, run_dir.supervisor_log, *full, run_dir.state_file):
            old.unlink(missing_ok=True)
        check_room(run_dir.path, DISK_BYTES, "settings, state and logs", "free some, or choose another with --run-dir")
        run_dir.settings_file.write_text(settings.model_dump_json(indent=1))
        run_dir.settings_file.chmod(0o600)
    except OSError as error:
        raise cannot_write(run_dir.settings_file, error) from None


def _start_supervisor(run_dir: RunDir) -> subprocess.Popen[bytes]:
    with run_dir.supervisor_log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "redraft.serving.supervisor", str(run_dir.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {OWNER_VARIABLE: str(run_dir.path)},
            cwd=SITE,
            start_new_session=True,
        )


def _follow(run_dir: RunDir, supervisor: subprocess.Popen[bytes], on_progress: Callable[[str], None]) -> State:
    last_detail = ""
    while True:
        ended = supervisor.poll() is not None
        state = run_dir.read_state()
        if state and state.phase == "ready":
            return state
        if ended:
            log = f"the supervisor ended with status {supervisor.returncode}:\n{tail(run_dir.supervisor_log)}"
            raise ServingError(state.error if state and state.error else log)
        if state and state.detail != last_detail:
            last_detail = state.detail
            on_progress(last_detail)
        time.sleep(_POLL_S)
