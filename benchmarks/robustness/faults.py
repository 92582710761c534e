"""Kill and stop every process of a service under six streams, and see that it comes back as it should.

    python -m benchmarks.robustness.faults --bundle BUNDLE

Starts a service of its own on free ports. Each process in turn gets SIGKILL, then SIGSTOP, beside two streams of each
protocol. It must be back within 5 s, the worker within its load time and 2 s. The exit status is 1 where something
takes longer, a process or shared memory is left over, health says ready while requests fail, a stream hangs, or one
ends without an error and without its whole text.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from benchmarks.command import BundleFolder, Report, console, run
from benchmarks.robustness import service
from benchmarks.robustness.malformed import Overloaded, grpc_stream
from redraft.bundle.folder import bundle_ranks
from redraft.loadtest.clients.base import Client, Generation, GenerationError
from redraft.loadtest.results import save_report
from redraft.loadtest.tables import Table
from redraft.serving import launcher
from redraft.serving.listeners import ANSWER_S
from redraft.serving.processes import ServingError, is_alive, owned_processes
from redraft.serving.rundir import RunDir, State
from redraft.serving.settings import ServeSettings

BACK_S, WORKER_BACK_S = 5.0, 2.0
"""A process is back after so long; the worker takes its load time, and so long."""
LAG_S = 3.0
"""Health may be so late: a process that is stopped is noticed after 1 s."""
UNWATCHED = ("supervisor", service.LAUNCHER)
"""Where these are stopped, all goes on without them, and nobody restarts them."""
STOPPED_S = 5.0
"""How long they are stopped."""
LONGEST_S = 120.0
EVERY_S = 0.1
STREAMS = 6


@dataclass
class Fault:
    """A signal to a process, and what became of it. Times are seconds from the signal on."""

    process: str
    signal: str
    limit_s: float
    back_s: float | None = None
    lies: int = 0
    """How often health said ready while requests failed."""
    left: list[str] = field(default_factory=list)
    """Processes and shared memory left over."""
    streams: Counter[str] = field(default_factory=Counter)
    """How streams ended meanwhile: whole, failed (with an error), changed or hang."""
    unwatched: bool = False
    """Whether all should go on meanwhile."""
    error: str = ""
    """What kept the case from being seen to its end."""

    @property
    def wrong(self) -> list[str]:
        """What is not as it should be."""
        if self.error:
            return [self.error]
        late = self.back_s is None or self.back_s > self.limit_s
        said = [f"back after {self.back_s or LONGEST_S:.1f} s"] * late
        said += [f"health was wrong {self.lies} times"] * bool(self.lies)
        bad = ("changed", "hang", *["failed"] * self.unwatched)
        said += [f"{self.streams[how]} streams: {how}" for how in bad if self.streams[how]]
        return [*said, *(f"left: {one}" for one in self.left)]

    @property
    def report(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return vars(self) | {"wrong": self.wrong}


class Streams:
    """Two streams of each protocol, run again and again in a thread."""

    def __init__(self, settings: ServeSettings, tokens: int):
        """Returns when each stream has ended once. Raises what ends the thread before that; `stop` what does later."""
        self.counts: Counter[str] = Counter()
        self._settings, self._tokens = settings, tokens
        self._over, self._begun = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self._begun.wait()
        self._check()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:
            self._error = error
        finally:
            self._begun.set()

    async def _run(self) -> None:
        wanted = list(service.generations(STREAMS, self._tokens))
        async with service.connected(self._settings) as clients:
            protocols = [service.PROTOCOLS[index % len(service.PROTOCOLS)] for index in range(STREAMS)]
            texts = [await service.text(clients[name], wanted[index]) for index, name in enumerate(protocols)]
            self._begun.set()

            async def again_and_again(index: int) -> None:
                while not self._over.is_set():
                    how = await outcome(clients[protocols[index]], wanted[index], texts[index])
                    self.counts[how] += 1
                    await asyncio.sleep(0 if how == "whole" else EVERY_S)

            await asyncio.gather(*map(again_and_again, range(STREAMS)))


async def outcome(client: Client, wanted: Generation, expected: str) -> str:
    """How a stream ended: whole, changed, failed or hang."""
    try:
        return "whole" if await service.text(client, wanted) == expected else "changed"
    except GenerationError:
        return "failed"
    except TimeoutError:
        return "hang"


def get(port: int, path: str, body: dict | None = None) -> bool:
    """Whether a request is answered with status 200 in time."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, data, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Watch:
    """Asks the health of Triton and of `/v1`, and for an answer of each, until it is told to stop."""

    def __init__(self, settings: ServeSettings):
        short = {"max_tokens": 1}
        self._asked: dict[str, Callable[[], bool]] = {
            "Triton's health": lambda: get(settings.http_port, "/v2/health/ready"),
            "Triton": lambda: get(
                settings.http_port, "/v2/models/ensemble/generate", short | {"text_input": "hi", "stream": False}
            ),
            "/v1's health": lambda: get(settings.openai_port, "/health"),
            "/v1": lambda: get(settings.openai_port, "/v1/completions", short | {"prompt": "hi"}),
        }
        self.seen: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in self._asked}
        """When each was asked, when that was answered, and whether it was well."""
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(name,)) for name in self._asked]
        for thread in self._threads:
            thread.start()

    def _ask(self, name: str) -> None:
        while not self._over.is_set():
            asked = time.monotonic()
            well = self._asked[name]()
            self.seen[name].append((asked, time.monotonic(), well))
            self._over.wait(EVERY_S)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def well_since(self, moment: float) -> bool:
        """Whether all were well when they were last asked, after that moment."""
        last = [seen[-1] if seen else (0.0, 0.0, False) for seen in self.seen.values()]
        return all(well and asked > moment for asked, _, well in last)

    def lies(self, begun: float) -> int:
        """How often health said ready although requests had failed for LAG_S since the fault had begun."""
        return sum(_lies(self.seen[f"{name}'s health"], self.seen[name], begun) for name in ("Triton", "/v1"))


def _lies(health: list[tuple[float, float, bool]], truth: list[tuple[float, float, bool]], begun: float) -> int:
    count, failing_since = 0, None
    for asked, answered, well in truth:
        if well:
            failing_since = None
            continue
        failing_since = asked if failing_since is None else failing_since
        begin = max(failing_since, begun) + LAG_S
        count += sum(said for at, _, said in health if max(begin, asked) < at < answered)
    return count


def loads(process: str) -> bool:
    """Whether the bundle is loaded again where a process ends."""
    return process in ("worker", service.LAUNCHER) or process.startswith("rank")


class Trial:
    """A service of one's own, which faults happen to."""

    def __init__(self, bundle: Path, folder: Path, port: int, tokens: int):
        self.run_dir, self.tokens, self.ranks = RunDir(folder), tokens, bundle_ranks(bundle)
        self.settings = ServeSettings(
            bundle=bundle,
            http_port=port,
            grpc_port=port + 1,
            metrics_port=port + 2,
            openai_port=port + 3,
        )
        self.load_s = math.inf
        self.others = service.mpi_memory()
        self.serve()
        launcher.stop(folder)  # the first start may compile the CPU operators
        self.serve()

    def serve(self) -> None:
        """Start it, and note how long the worker takes to load, if no start took it less."""
        begun = time.monotonic()
        moments: dict[str, float] = {}

        def note(said: str) -> None:
            moments.setdefault(said, time.monotonic())

        launcher.serve(self.settings, self.run_dir.path, note)
        self.load_s = min(self.load_s, moments.get("loading Triton's models", time.monotonic()) - begun)

    def limit_s(self, process: str, stopped: bool) -> float:
        """How long a process may be away."""
        return self.load_s + WORKER_BACK_S if loads(process) and not (stopped and process in UNWATCHED) else BACK_S

    def attempt(self, name: str, number: signal.Signals) -> Fault:
        """Inflict a fault on a service that runs. Where this itself fails, the fault says why, and the next one has a
        service of its own."""
        try:
            if not launcher.is_running(self.run_dir):
                self.serve()
            return self.inflict(name, number)
        except Exception as error:
            launcher.stop(self.run_dir.path)
            limit_s = self.limit_s(name, number is signal.SIGSTOP)
            return Fault(name, number.name, limit_s, error=f"{type(error).__name__}: {error}")

    def inflict(self, name: str, number: signal.Signals) -> Fault:
        """Send a process a signal beside the streams, and wait until all is well again."""
        stopped = number is signal.SIGSTOP
        fault = Fault(name, number.name, self.limit_s(name, stopped), unwatched=stopped and name in UNWATCHED)
        streams, watch = Streams(self.settings, self.tokens), Watch(self.settings)
        try:
            victim = service.processes(self.state())[name]
            begun = time.monotonic()
            victim.send_signal(number)
            if fault.unwatched:
                time.sleep(STOPPED_S)
                victim.resume()
                fault.limit_s += STOPPED_S
            elif name == "supervisor":
                self._serve_anew(fault)
            while fault.back_s is None and time.monotonic() < begun + LONGEST_S:
                gone = fault.unwatched or name == "supervisor" or not is_alive(victim)
                if gone and self.state().phase == "ready" and watch.well_since(begun) and self._grpc_answers():
                    fault.back_s = time.monotonic() - begun
                time.sleep(EVERY_S)
        finally:
            watch.stop()
            streams.stop()
        fault.streams = streams.counts
        if name != "supervisor":
            fault.lies = watch.lies(begun)
        fault.left += service.orphans(self.run_dir.path, self.state().supervisor_pid)
        fault.left += service.leaked_memory(self.run_dir.path, self.ranks, self.others)
        return fault

    def _serve_anew(self, fault: Fault) -> None:
        """All ends with a killed supervisor, nothing is left, and `redraft serve` starts anew."""
        deadline = time.monotonic() + BACK_S
        while (left := owned_processes(self.run_dir.path)) and time.monotonic() < deadline:
            time.sleep(EVERY_S)
        fault.left += [*map(str, left), *service.leaked_memory(self.run_dir.path, self.ranks, self.others)]
        begun = time.monotonic()
        self.serve()
        fault.limit_s += time.monotonic() - begun

    def _grpc_answers(self) -> bool:
        try:
            return bool(grpc_stream(self.settings.grpc_port, 2))
        except (grpc.RpcError, RuntimeError, ValueError, OSError, Overloaded):
            return False

    def state(self) -> State:
        """What the supervisor says."""
        state = self.run_dir.read_state()
        assert state is not None
        return state

    def stop(self) -> list[str]:
        """End the service. Returns what is left of it."""
        launcher.stop(self.run_dir.path)
        path = self.run_dir.path
        return [*map(str, owned_processes(path)), *service.leaked_memory(path, self.ranks, self.others)]


def table(report: dict[str, Any]) -> Table:
    """One row per fault of what the script writes."""
    result = Table("Faults", ["process", "signal", "back, s", "at most, s", "streams", "wrong"])
    for fault in report["faults"]:
        streams = ", ".join(f"{how}: {count}" for how, count in sorted(fault["streams"].items()))
        back = "never" if fault["back_s"] is None else f"{fault['back_s']:.1f}"
        wrong = "; ".join(fault["wrong"]) or "-"
        result.rows.append([fault["process"], fault["signal"], back, f"{fault['limit_s']:.1f}", streams, wrong])
    return result


def main(
    bundle: BundleFolder,
    port: Annotated[int, typer.Option(help="The first of four ports.")] = 18_100,
    process: Annotated[list[str] | None, typer.Option(help="Processes to kill; default: all.")] = None,
    stream_tokens: Annotated[int, typer.Option(help="Tokens of each stream.")] = 64,
    output: Report = Path("artifacts/reports/faults.json"),
) -> int:
    """Writes JSON after each fault. Returns 1 where something is wrong."""
    faults: list[Fault] = []

    def write(left: list[str] | None = None) -> dict[str, Any]:
        report = {"bundle": bundle.name, "load_s": trial.load_s, "faults": [fault.report for fault in faults]}
        save_report(output, report | {"left": left})
        return report

    with tempfile.TemporaryDirectory(prefix="redraft-faults-") as folder:
        try:
            trial = Trial(bundle, Path(folder), port, stream_tokens)
        except ServingError as error:
            raise typer.BadParameter(str(error)) from None
        try:
            names = process or list(service.processes(trial.state()))
            console.print(f"the worker loads in {trial.load_s:.1f} s; processes: {', '.join(names)}", markup=False)
            for name in names:
                for number in (signal.SIGKILL, signal.SIGSTOP):
                    faults.append(trial.attempt(name, number))
                    write()
                    console.print(f"{name} {number.name}: {'; '.join(faults[-1].wrong) or 'well'}", markup=False)
        finally:
            left = trial.stop()
    table(write(left)).show(console)
    console.print(f"left after the stop: {', '.join(left) or 'nothing'}\nwritten to {output}", markup=False)
    return int(bool(left) or any(fault.wrong for fault in faults))


if __name__ == "__main__":
    run(main)
