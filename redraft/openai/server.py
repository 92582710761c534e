"""The front end's process: `python -m redraft.openai.server --bundle PATH --socket PATH`.

All else are settings of the service. By hand they are set by variables, such as REDRAFT_OPENAI_PORT. The keys, if any,
are in REDRAFT_API_KEY in both cases.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

import uvicorn

from redraft import logs
from redraft.openai.access import Access, Gate, hosts
from redraft.openai.app import create_app
from redraft.openai.connection import Connection
from redraft.openai.metrics import FrontEndMetrics
from redraft.openai.model import ServedModel
from redraft.openai.service import Service
from redraft.openai.tracing import Tracing, exporting
from redraft.serving.guard.limits import IDLE_S
from redraft.serving.listeners import FRONT_END_DRAIN_S, MAX_LOG_BYTES
from redraft.serving.settings import API_KEY_VARIABLE, process_settings
from redraft.worker.client import WorkerClient

OBJECTS = 100_000
"""New objects after which Python looks for circles. A large body has a million: with Python's own 700 it takes four
times as long to read, and no stream goes on meanwhile."""

log = logging.getLogger("redraft.openai")


class Log(RotatingFileHandler):
    """A log that standard output and error go to as well. When it has half of what it may, it is moved to a file with
    `.1` after its name, as the supervisor does at a restart."""

    def __init__(self, path: Path):
        super().__init__(path, maxBytes=MAX_LOG_BYTES // 2, backupCount=1)

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
        return stream


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM; the exit status is 2 where the bundle cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m redraft.openai.server", description=__doc__.split("\n")[0])
    parser.add_argument("--bundle", type=Path, required=True, help="Folder of the engine bundle")
    parser.add_argument("--socket", type=Path, required=True, help="The worker's socket")
    parser.add_argument(
        "--log", type=Path, help="The file that the output goes to, which this process keeps short; default: none"
    )
    options = parser.parse_args(argv)
    settings = process_settings()
    handlers = [Log(options.log)] if options.log else None
    logs.configure(handlers=handlers)
    try:
        model = ServedModel(options.bundle, settings)
        tracing = Tracing(exporting(), model.name)
    except (OSError, ValueError, RuntimeError) as error:
        log.error("redraft /v1: %s", error)
        return 2
    metrics = FrontEndMetrics(options.socket)
    keys = frozenset(os.environ.get(API_KEY_VARIABLE, "").split())
    access = Access(settings.address, hosts(settings.allow_host), keys)
    gc.set_threshold(OBJECTS)
    with WorkerClient(options.socket) as client:
        uvicorn.run(
            Gate(create_app(Service(model, client, metrics, settings.silence_s, tracing)), access, metrics),
            host=settings.address,
            port=settings.openai_port,
            workers=1,
            proxy_headers=bool(settings.trusted_proxy),
            forwarded_allow_ips=settings.trusted_proxy,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_S),
            timeout_graceful_shutdown=FRONT_END_DRAIN_S,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
