"""The run directory of a service: socket, logs, state file, and the settings it was started with."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import json
import os
import pwd
import stat
import time
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ValidationError

from redraft.serving.processes import ServingError
from redraft.serving.settings import ServeSettings
from redraft.worker.protocol import STARTING, STOPPING, SUPERVISOR_PIPE

_MAX_SOCKET_PATH = 100
_LOCK_S = 1.0
_LOG_LINES = 15
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)

Phase = Literal["starting", "ready", "degraded", "stopping", "stopped", "failed"]
SwapPhase = Literal["loading", "draining", "done", "failed"]


class SwapOrder(BaseModel):
    """An order of `redraft swap` to the supervisor."""

    id: str
    bundle: Path
    back: bool = False
    """Whether it is the bundle that was served before, to which it goes back."""


class SwapState(BaseModel):
    """The last swap, or the one that goes on: in `draining` the new bundle serves, and the old one's requests end."""

    order: SwapOrder
    phase: SwapPhase = "loading"
    error: str = ""
    """Why it failed; the old bundle serves on."""


class State(BaseModel):
    """What the supervisor says about itself: `detail` is the current activity, `error` why it failed.

    Of a worker with several ranks: their process ids on this machine, how often each failed, and how one did last;
    rank -1 is one on another machine.
    """

    phase: Phase = "starting"
    detail: str = ""
    error: str = ""
    supervisor_pid: int = 0
    worker_pid: int = 0
    triton_pid: int = 0
    guard_pid: int = 0
    openai_pid: int = 0
    worker_restarts: int = 0
    triton_restarts: int = 0
    guard_restarts: int = 0
    openai_restarts: int = 0
    rank_pids: dict[int, int] = {}
    rank_failures: dict[int, int] = {}
    last_failure: str = ""
    swap: SwapState | None = None
    before: list[Path] = []
    """The bundles that were served before, the last one last; going back takes it off."""
    settings: ServeSettings
    """What it was started with, and the bundle that is served now."""


def check_text(path: Path, kind: str) -> None:
    """Raises ServingError for a path that is not UTF-8: no settings and no log can name it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ServingError(f"the path of the {kind} is not UTF-8: {str(path)!a}; rename it or choose another") from None


class RunDir:
    """Paths of one service. Raises ServingError where the path is a circle of links, not UTF-8, or too long for a Unix
    socket."""

    def __init__(self, path: Path):
        try:
            self.path = path.resolve()
        except (OSError, RuntimeError):
            raise ServingError(
                f"cannot use the run directory {path}: its links lead in a circle; choose another with --run-dir"
            ) from None
        check_text(self.path, "run directory")
        self.socket = self.path / "worker.sock"
        """A link to the socket of the worker that takes new requests."""
        self.bundle = self.path / "bundle"
        """A link to its bundle."""
        self.http_socket = self.path / "http.sock"
        self.grpc_socket = self.path / "grpc.sock:1"  # Triton ends the name with a port
        self.metrics_socket = self.path / "metrics.sock"
        """Where Triton listens, for the supervisor."""
        self.open_http = self.path / "open_http.sock"
        self.open_grpc = self.path / "open_grpc.sock"
        """Links to Triton's sockets, for the guard: see `open`."""
        self.pipe = self.path / SUPERVISOR_PIPE
        self.starting = self.path / STARTING
        self.stopping = self.path / STOPPING
        self.state_file = self.path / "state.json"
        self.settings_file = self.path / "settings.json"
        self.swap_order = self.path / "swap.json"
        self.lock_file = self.path / "lock"
        self.models = self.path / "models"
        self.stand_ins = self.path / "stand_ins"
        self.backends = self.path / "backends"
        self.worker_log = self.path / "worker.log"
        self.triton_log = self.path / "triton.log"
        self.openai_log = self.path / "openai.log"
        self.guard_log = self.path / "guard.log"
        self.supervisor_log = self.path / "supervisor.log"
        if len(os.fsencode(self.socket)) > _MAX_SOCKET_PATH:
            raise ServingError(
                f"the path {self.socket} is too long for a Unix socket ({_MAX_SOCKET_PATH} bytes): "
                "choose a shorter one with --run-dir"
            )

    def create(self) -> None:
        """Make the directory, or close it to other users (0700): its socket takes orders, its models are run.

        Raises ServingError for one of another user, for one that is or was open to others and holds what may be theirs,
        and for one that others could move away; OSError.
        """
        for parent in self.path.parents:
            if parent.exists() and not _only_ours(parent.stat()):
                raise ServingError(
                    f"the run directory {self.path} can be replaced by another user, who could run code as this "
                    f"service: {parent} is theirs, or they can write to it; choose another with --run-dir"
                )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.path.stat()
        if status.st_uid != os.geteuid():
            raise ServingError(
                f"the run directory {self.path} belongs to another user, who could run code as this service: "
                "choose another with --run-dir"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            used = any(self.path.iterdir())
            if used and status.st_mode & 0o022:
                raise ServingError(
                    f"other users can write to the run directory {self.path}, and it holds files: empty it, or choose "
                    "another with --run-dir"
                )
            if used and not self.settings_file.exists():
                raise ServingError(
                    f"the run directory {self.path} is open to other users and holds other files: "
                    "`chmod 700` it, or choose another with --run-dir"
                )
            self.path.chmod(0o700)

    def worker_socket(self, number: int) -> Path:
        """Where the worker of this number listens: 0 for the first, one more for each swap."""
        return self.path / f"worker-{number}.sock"

    def open(self) -> None:
        """Let the guard reach Triton, which is there, and calls itself ready, before the worker is; and `/v1` say that
        it is ready. Raises OSError."""
        point(self.open_http, Path(self.http_socket.name))
        point(self.open_grpc, Path(self.grpc_socket.name))
        self.starting.unlink(missing_ok=True)

    def remove_sockets(self) -> None:
        """Take the workers' sockets away, and the signs of a start and a stop. Raises OSError."""
        for path in (self.socket, self.starting, self.stopping, *self.path.glob("worker-*.sock")):
            path.unlink(missing_ok=True)

    def take_order(self) -> SwapOrder | None:
        """Read the order of `redraft swap` and remove it; None where there is none, or one that cannot be read."""
        try:
            text = self.swap_order.read_text()
            self.swap_order.unlink()
            return SwapOrder.model_validate_json(text)
        except (OSError, ValueError):
            return None

    def read_state(self) -> State | None:
        """The last state that was written, None if there is none.

        A service that another version of this package has started is to be stopped too: of its settings, those that are
        unknown or refused here and those without a value are left out.
        """
        try:
            content = json.loads(self.state_file.read_text())
            settings = content["settings"] = {
                name: value
                for name, value in content["settings"].items()
                if name in ServeSettings.model_fields and value is not None
            }
            try:
                return State.model_validate(content)
            except ValidationError as error:
                for fault in error.errors():
                    if fault["loc"][0] == "settings" and len(fault["loc"]) > 1:
                        settings.pop(fault["loc"][1], None)
            return State.model_validate(content)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def write_state(self, state: State) -> None:
        """Replace the state file in one move."""
        _replace(self.state_file, state)

    def write_order(self, order: SwapOrder) -> None:
        """Leave an order to the supervisor."""
        _replace(self.swap_order, order)


def hold(lock: IO[str]) -> None:
    """Lock the file. Raises BlockingIOError if another supervisor has it; `redraft status` only has it for a moment."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def cannot_write(path: Path, error: OSError) -> ServingError:
    """What to raise where a file of the run directory cannot be written."""
    remedy = ": free space on its disk, or choose another directory with --run-dir"
    return ServingError(f"cannot write {path}: {error.strerror}{remedy if error.errno in _DISK_IS_FULL else ''}")


def point(link: Path, target: Path) -> None:
    """Make a link lead to `target`, in one move. Raises OSError."""
    new = link.with_suffix(".new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)


def _replace(file: Path, content: BaseModel) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(content.model_dump_json(indent=1))
    temporary.replace(file)


def _only_ours(folder: os.stat_result) -> bool:
    """Whether no other user but root can rename what this user has in the folder."""
    if folder.st_uid not in (0, os.geteuid()):
        return False
    if folder.st_mode & stat.S_ISVTX:
        return True
    return not folder.st_mode & (stat.S_IWOTH if _own_group(folder.st_gid) else stat.S_IWGRP | stat.S_IWOTH)


def _own_group(gid: int) -> bool:
    """Whether the group is this user's only: of the same name, as many systems make one for each user."""
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    return False


def tail(path: Path) -> str:
    """The last lines of a log, indented, "" if there is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in text.splitlines()[-_LOG_LINES:])
