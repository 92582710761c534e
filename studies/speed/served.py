"""Decoders for a comparison whose bundle a worker of its own executes, with all of its ranks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.speed.inprocess import Clock
from redraft.bundle.folder import bundle_ranks
from redraft.llm import Answer
from redraft.metrics import read
from redraft.request import GenerateRequest
from redraft.serving.ranks import launch_command
from redraft.serving.settings import ServeSettings, TextScope, environment_of
from redraft.worker.client import WorkerClient
from redraft.worker.protocol import DRAIN_S

START_S, END_S, POLL_S = 300.0, DRAIN_S + 10, 0.2


@contextmanager
def worker_of(bundle: Path, threads: int | None = None) -> Iterator[WorkerClient]:
    """A client of a worker that serves `bundle`, started on entry and ended on exit.

    Raises RuntimeError for a worker that ends or does not answer, ServingError where its ranks cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="redraft-") as folder, WorkerClient(Path(folder) / "worker.sock") as client:
        command = [
            sys.executable,
            "-m",
            "redraft.worker.server",
            "--bundle",
            str(bundle.resolve()),
            "--socket",
            f"{folder}/worker.sock",
        ]
        environment = environment_of(ServeSettings(threads=threads, served_texts=TextScope.off, prefix_reuse=False))
        process = subprocess.Popen(launch_command(command, bundle_ranks(bundle)), env=environment)
        try:
            deadline = time.monotonic() + START_S
            while not client.wait_connected(POLL_S):
                if process.poll() is not None:
                    raise RuntimeError(f"the worker of {bundle} ended with status {process.returncode}")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the worker of {bundle} did not answer within {START_S:.0f} s")
            yield client
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class Served:
    """A worker and the method that its requests name: a `benchmarks.load.comparison.Decoder`."""

    client: WorkerClient
    method: str

    def run(self, requests: Sequence[GenerateRequest]) -> tuple[list[Answer], Clock]:
        """See `Decoder.run`; one after the other."""
        before, started = self._clock(), time.perf_counter()
        answers = [self._answer(request) for request in requests]
        wall_s = time.perf_counter() - started
        return answers, self._clock().since(before).plus(Clock(wall_s=wall_s))

    def _answer(self, request: GenerateRequest) -> Answer:
        own = request.model_copy(update={"id": self.client.new_id(), "method": self.method})
        started = time.perf_counter()
        answer = self.client.complete(own)
        seconds = time.perf_counter() - started
        assert answer.stats is not None
        assert answer.finish_reason is not None
        return Answer(answer.token_ids, answer.text, answer.finish_reason, stats=answer.stats, seconds=seconds)

    def _clock(self) -> Clock:
        values = read(self.client.status(metrics=True).metrics)
        step_s, engine_s, draft_s = (values[f"{name}_seconds_total"] for name in ("step", "engine", "draft"))
        return Clock(0.0, step_s, engine_s - draft_s, draft_s, int(values["engine_steps_total"]))
