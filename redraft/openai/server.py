"""The front end's process: `python -m redraft.openai.server --bundle PATH --socket PATH --port 8003`.

The keys that it takes, if any, are in the environment variable REDRAFT_API_KEY, between spaces: other users can read
arguments.
"""

from __future__ import annotations

import argparse
import gc
import json
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
from redraft.openai.launch import API_KEY_VARIABLE, DRAIN_S, MAX_LOG_BYTES, Defaults
from redraft.openai.metrics import Metrics
from redraft.openai.model import ServedModel
from redraft.openai.service import Service
from redraft.openai.structured.forms import FORMS
from redraft.openai.structured.thoughts import MARKS, NO_THOUGHTS
from redraft.openai.tracing import Tracing, exporting
from redraft.serving.guard.limits import IDLE_S
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
    parser.add_argument("--bundle", type=Path, required=True, help="folder of the engine bundle")
    parser.add_argument("--socket", type=Path, required=True, help="the worker's socket")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--allow-host", action="append", default=[], help="another name that clients may use")
    parser.add_argument("--model-name", help="the model's name in the API (default: the bundle's)")
    parser.add_argument("--tool-parser", choices=FORMS, help="the form of its tool calls (default: its template's)")
    parser.add_argument(
        "--generation-config", choices=[*Defaults], default=Defaults.auto, help="vllm: not the model's own"
    )
    parser.add_argument("--chat-template-kwargs", type=json.loads, default={}, help="options of the chat template")
    parser.add_argument("--sanitize-control-tokens", action="store_true", help="those that messages spell stay text")
    parser.add_argument(
        "--reasoning-parser", choices=[*MARKS, NO_THOUGHTS], help="the marks of its thoughts (default: its template's)"
    )
    parser.add_argument("--silence-s", type=float, default=30.0, help="a worker silent for longer is away")
    parser.add_argument("--log", type=Path, help="the file that the output goes to, which this process keeps short")
    options = parser.parse_args(argv)
    handlers = [Log(options.log)] if options.log else None
    logs.configure(handlers=handlers)
    try:
        model = ServedModel(
            options.bundle,
            options.model_name,
            options.tool_parser,
            options.reasoning_parser,
            own_defaults=options.generation_config == Defaults.auto,
            template_options=options.chat_template_kwargs,
            sanitizes=options.sanitize_control_tokens,
        )
        tracing = Tracing(exporting(), model.name)
    except (OSError, ValueError, RuntimeError) as error:
        log.error("redraft /v1: %s", error)
        return 2
    metrics = Metrics()
    access = Access(options.address, hosts(options.allow_host), frozenset(os.environ.get(API_KEY_VARIABLE, "").split()))
    gc.set_threshold(OBJECTS)
    with WorkerClient(options.socket) as client:
        uvicorn.run(
            Gate(create_app(Service(model, client, metrics, options.silence_s, tracing)), access, metrics),
            host=options.address,
            port=options.port,
            workers=1,
            proxy_headers=False,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_S),
            timeout_graceful_shutdown=DRAIN_S,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
