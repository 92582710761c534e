"""Services of `redraft serve` that a benchmark starts and stops."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

PORTS = ("--http-port", "--grpc-port", "--metrics-port", "--openai-port")
FirstPort = Annotated[int, typer.Option("--port", help="The first of four ports: HTTP, gRPC, metrics and /v1.")]


def run(*arguments: object, env: dict[str, str] | None = None) -> None:
    """Run one of our modules; exit with its status where it fails."""
    done = subprocess.run([sys.executable, "-m", *map(str, arguments)], env=env)
    if done.returncode:
        raise SystemExit(done.returncode)


@contextmanager
def served(what: Sequence[object], run_dir: Path, port: int, env: dict[str, str] | None = None) -> Iterator[float]:
    """A service of `redraft serve` with these options on four ports from `port` on, stopped at the end: the seconds
    until it was ready."""
    ports = [word for index, name in enumerate(PORTS) for word in (name, port + index)]
    started = time.perf_counter()
    try:
        # Prompts that are sent again would be drafted from their first answers.
        run("redraft", "serve", *what, "--served-texts", "off", "--run-dir", run_dir, *ports, env=env)
        yield time.perf_counter() - started
    finally:
        run("redraft", "stop", "--run-dir", run_dir, env=env)
