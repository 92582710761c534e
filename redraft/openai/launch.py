"""The front end's process as the supervisor has it. Imports no web framework."""

from __future__ import annotations

import http.client
import logging
import os
import sys
from pathlib import Path

from redraft.serving.child import Child
from redraft.serving.pulse import Pulse
from redraft.serving.rundir import RunDir, Settings

API_KEY_VARIABLE = "REDRAFT_API_KEY"
"""Environment variable with the key that the front end asks clients for."""
ALLOW_HOST_VARIABLE = "REDRAFT_ALLOW_HOST"
"""Environment variable with names for `--allow-host`, separated by spaces."""
DRAIN_S = 2
"""How long requests may go on after SIGTERM."""
PROBE_S, ANSWER_S, SILENCE_S, START_S = 2.0, 5.0, 15.0, 60.0
"""It is asked every 2 s, and restarted where two questions in a row, 15 s together, find no answer within 5 s."""
MAX_DELAY_S = 5.0
MAX_LOG_BYTES = 32 * 2**20
LOOPBACK = "127.0.0.1"
REPOSITORY = Path(__file__).resolve().parents[2]

log = logging.getLogger("redraft.supervisor")


class FrontEnd:
    """The process, started again where it ends or does not answer."""

    def __init__(self, run_dir: RunDir, settings: Settings):
        self.child = Child(
            run_dir,
            "openai",
            "the /v1 front end",
            command(run_dir, settings),
            run_dir.openai_log,
            dict(os.environ),
            REPOSITORY,
            MAX_DELAY_S,
            MAX_LOG_BYTES,
        )
        self.pulse = Pulse(lambda: answers(settings.openai_port, ANSWER_S), PROBE_S)

    def start(self) -> None:
        """Start it; it is up when it has answered."""
        self.child.start()
        self.pulse.reset()

    def watch(self) -> str:
        """Do what it needs now. Returns what befell it, "" for nothing new."""
        child = self.child
        alive, silence = child.alive, self.pulse.silence
        if child.up:
            if alive and silence < SILENCE_S:
                return ""
            child.up = False
            child.end(grace=0)
            return f"{child.name} {f'did not answer for {silence:.0f} s' if alive else 'died'} and is restarting"
        if not alive:
            if child.restart_due():
                self.start()
        elif self.pulse.answered:
            child.up = True
        elif child.age > START_S:
            log.error("%s was not ready within %.0f s", child.name, START_S)
            child.end(grace=0)
        return ""


def command(run_dir: RunDir, settings: Settings) -> list[str]:
    """Command line of the process."""
    return [
        *(sys.executable, "-m", "redraft.openai.server"),
        *("--bundle", str(settings.bundle), "--socket", str(run_dir.socket)),
        *("--log", str(run_dir.openai_log), "--silence-s", str(settings.silence_s)),
        *("--address", settings.address, "--port", str(settings.openai_port)),
        *(["--model-name", settings.model_name] if settings.model_name else []),
        *(argument for name in settings.allowed_hosts for argument in ("--allow-host", name)),
    ]


def answers(port: int, timeout: float) -> bool:
    """Whether it answers, be it that the worker is away."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=timeout)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status in (200, 503)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
