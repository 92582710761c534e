"""Send a running service malformed requests beside two streams, whose texts must not change.

    redraft serve --bundle BUNDLE
    python -m benchmarks.robustness.malformed --run-dir artifacts/run

The requests go to Triton's ports for HTTP, gRPC and metrics, and to /v1. Each follows from --seed and its number:
--first NUMBER --requests 1 sends one of them again. The exit status is 1 where a part of the service was restarted, a
request was neither answered nor closed, or was answered with a fault of the service's own, a stream's text changed, or
the service does not answer at the end.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import grpc
import numpy as np
import typer
from tritonclient.grpc import InferResult
from tritonclient.grpc import service_pb2 as pb

from benchmarks.command import Report, console, run
from benchmarks.robustness import grpc_requests, http_requests
from benchmarks.robustness.grpc_requests import Call
from benchmarks.robustness.http_requests import METRICS, OPENAI, TRITON, Raw
from benchmarks.robustness.service import HANG_S, read_state
from redraft.console.progress import progress
from redraft.errors import Code
from redraft.loadtest.results import finish
from redraft.loadtest.tables import Table
from redraft.serving.rundir import RunDir, State
from redraft.serving.triton.messages import split_code

HOST = "127.0.0.1"
QUIET_S = 0.3
"""Where no answer begins for so long, a client says that it has no more to send."""
RETRY_S, LAST_TRIES = 0.2, 100
"""After a stream that was refused or failed, and how often it is tried at the end, when the queue may still be full."""
HANG = "hang"
FAULTS = ("500", "INTERNAL", "UNKNOWN")
"""Outcomes that blame the service for a request that was at fault."""
PROTOCOLS = ("http", "grpc", "v1", "metrics")
VALID = {"http": TRITON, "v1": OPENAI, "metrics": METRICS}
"""What the malformed requests over HTTP were made from."""
NOT_ARRIVED = "did not arrive"
"""What the server says of a message for which it has waited long enough."""
PROMPT = "The history of the steam engine begins"
_SERVICE = "/inference.GRPCInferenceService/"


class Overloaded(Exception):
    """A stream was refused since the queue was full."""


@dataclass
class Neighbour:
    """A stream that is run again and again, and what became of it."""

    name: str
    run: Callable[[], str]
    undisturbed: str = ""
    runs: int = 0
    refused: int = 0
    """How often the queue was full."""
    changed: list[str] = field(default_factory=list)
    """What came instead, or the error."""

    def once(self) -> bool:
        """Run it, if the queue has room, and compare. Returns whether its text was the undisturbed one."""
        try:
            text = self.run()
        except Overloaded:
            self.refused += 1
            time.sleep(RETRY_S)
            return False
        except (OSError, http.client.HTTPException, grpc.RpcError, RuntimeError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
            time.sleep(RETRY_S)
        self.runs += 1
        if text != self.undisturbed:
            self.changed.append(text)
        return text == self.undisturbed

    def run_until(self, over: threading.Event) -> None:
        """Run it again and again."""
        while not over.is_set():
            self.once()


@dataclass
class Tally:
    """Outcomes of requests: HTTP statuses, gRPC codes, `closed` or `hang`."""

    outcomes: dict[str, dict[str, Counter[str]]] = field(
        default_factory=lambda: {protocol: defaultdict(Counter) for protocol in PROTOCOLS}
    )
    hangs: list[int] = field(default_factory=list)
    """Numbers of the requests."""
    faults: list[int] = field(default_factory=list)
    """Numbers of the requests with one of FAULTS."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, number: int, protocol: str, kind: str, outcome: str) -> int:
        """Count one. Returns how many there are."""
        with self.lock:
            self.outcomes[protocol][kind][outcome] += 1
            if outcome == HANG:
                self.hangs.append(number)
            if outcome in FAULTS:
                self.faults.append(number)
            return sum(count.total() for kinds in self.outcomes.values() for count in kinds.values())


def malformed(seed: int, number: int) -> tuple[str, str, Call | Raw]:
    """A request's protocol, kind and content."""
    rng = random.Random(f"{seed}:{number}")
    protocol = PROTOCOLS[number % len(PROTOCOLS)]
    if protocol == "grpc":
        return protocol, *grpc_requests.request(rng)
    return protocol, *http_requests.request(rng, VALID[protocol])


def send_raw(port: int, raw: Raw) -> str:
    """The status that bytes are answered with, `closed` for none, or `hang`."""
    answer, patient = b"", raw.patient
    deadline = time.monotonic() + HANG_S
    try:
        with socket.create_connection((HOST, port), timeout=HANG_S) as connection:
            with contextlib.suppress(OSError):  # a server may answer and close before all is sent
                connection.sendall(raw.data)
            while (left := deadline - time.monotonic()) > 0:
                connection.settimeout(left if patient else QUIET_S)
                try:
                    if not (piece := connection.recv(65_536)):
                        break
                    answer += piece[: 64 - len(answer)]
                except TimeoutError:
                    if not patient:
                        connection.shutdown(socket.SHUT_WR)
                    patient = True
            else:
                return HANG
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        pass
    words = answer.split(maxsplit=2)
    return words[1].decode("latin-1") if len(words) > 1 and words[0].startswith(b"HTTP/1") else "closed"


def send_call(channel: grpc.Channel, call: Call) -> str:
    """The code that a call ends with, `error in the stream`, or `hang`."""
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        yield from call.messages
        if call.patient:
            over.wait()

    try:
        if call.unary:
            channel.stream_unary(f"{_SERVICE}{call.name}")(messages(), timeout=HANG_S)
            return "OK"
        answers = channel.stream_stream(f"{_SERVICE}{call.name}")(messages(), timeout=HANG_S)
        errors = [pb.ModelStreamInferResponse.FromString(answer).error_message for answer in answers]
        return "error in the stream" if any(errors) else "OK"
    except grpc.RpcError as error:
        code = error.code()
        waited = code is grpc.StatusCode.DEADLINE_EXCEEDED and NOT_ARRIVED not in error.details()
        return HANG if waited else code.name
    finally:
        over.set()


def attack(state: State, numbers: Iterator[int], seed: int, clients: int, total: int) -> Tally:
    """Send the requests of these numbers, so many at a time."""
    tally, settings = Tally(), state.settings
    ports = {
        "http": settings.http_port,
        "grpc": settings.grpc_port,
        "v1": settings.openai_port,
        "metrics": settings.metrics_port,
    }

    def work() -> None:
        with grpc.insecure_channel(f"{HOST}:{ports['grpc']}", [("grpc.max_send_message_length", -1)]) as channel:
            while (number := next_number()) is not None:
                protocol, kind, request = malformed(seed, number)
                send = send_raw(ports[protocol], request) if isinstance(request, Raw) else send_call(channel, request)
                bar.update(tally.add(number, protocol, kind, send))

    lock = threading.Lock()

    def next_number() -> int | None:
        with lock:
            return next(numbers, None)

    with progress("malformed", total, "requests") as bar, ThreadPoolExecutor(clients) as pool:
        for future in [pool.submit(work) for _ in range(clients)]:
            future.result()
    return tally


def http_stream(port: int, tokens: int) -> str:
    """The text of a greedy stream over HTTP."""
    connection = http.client.HTTPConnection(HOST, port, timeout=HANG_S)
    try:
        body = {"text_input": PROMPT, "max_tokens": tokens, "stream": True, "end_id": -1}
        connection.request("POST", "/v2/models/ensemble/generate_stream", json.dumps(body))
        response = connection.getresponse()
        data = response.read().decode()
    finally:
        connection.close()
    if response.status == 429:
        raise Overloaded
    events = [json.loads(line.removeprefix("data: ")) for line in data.splitlines() if line.startswith("data: ")]
    if response.status != 200 or any("error" in event for event in events):
        raise RuntimeError(f"status {response.status}: {data[-300:]}")
    return "".join(event["text_output"] for event in events)


def grpc_stream(port: int, tokens: int) -> str:
    """The text of a sampled stream with a seed over gRPC."""
    request = grpc_requests.valid(PROMPT, tokens, seed=7)
    grpc_requests.add(request, "temperature", "FP32", np.float32(1.0).tobytes())
    grpc_requests.add(request, "end_id", "INT32", np.int32(-1).tobytes())
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        call = channel.stream_stream(
            f"{_SERVICE}ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        text = b""
        for answer in call(iter([request]), timeout=HANG_S):
            if split_code(answer.error_message)[0] is Code.OVERLOADED:
                raise Overloaded
            if answer.error_message:
                raise RuntimeError(answer.error_message)
            text += InferResult(answer.infer_response).as_numpy("text_output").item()
    return text.decode()


def restarts(state: State) -> dict[str, int]:
    """How often each part has been restarted."""
    return {part: getattr(state, f"{part}_restarts") for part in ("worker", "triton", "guard", "openai")}


def table(tally: Tally) -> Table:
    """One row per protocol."""
    result = Table("Malformed requests", ["protocol", "requests", "outcomes"])
    for protocol, kinds in tally.outcomes.items():
        outcomes = sum(kinds.values(), Counter[str]())
        text = ", ".join(f"{outcome}: {count}" for outcome, count in sorted(outcomes.items()))
        result.rows.append([protocol, str(outcomes.total()), text])
    return result


def main(
    run_dir: Annotated[Path, typer.Option(help="Run folder of the service.")] = Path("artifacts/run"),
    requests: Annotated[int, typer.Option(help="Requests to send.")] = 20_000,
    first: Annotated[int, typer.Option(help="Number of the first request.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed from which, with its number, a request follows.")] = 0,
    clients: Annotated[int, typer.Option("--concurrency", help="Requests at a time.")] = 8,
    stream_tokens: Annotated[int, typer.Option(help="Tokens of each stream.")] = 64,
    output: Report = Path("artifacts/reports/malformed.json"),
) -> int:
    """Returns 1 where something is wrong."""
    before = read_state(RunDir(run_dir))
    ports = before.settings
    neighbours = [
        Neighbour("HTTP, greedy", lambda: http_stream(ports.http_port, stream_tokens)),
        Neighbour("gRPC, sampled", lambda: grpc_stream(ports.grpc_port, stream_tokens)),
    ]
    for neighbour in neighbours:
        neighbour.undisturbed = neighbour.run()
    over, started = threading.Event(), time.monotonic()
    beside = [threading.Thread(target=neighbour.run_until, args=(over,)) for neighbour in neighbours]
    for thread in beside:
        thread.start()
    try:
        tally = attack(before, iter(range(first, first + requests)), seed, clients, requests)
    finally:
        over.set()
        for thread in beside:
            thread.join()
    seconds, after = time.monotonic() - started, RunDir(run_dir).read_state() or before
    answers = all(any(neighbour.once() for _ in range(LAST_TRIES)) for neighbour in neighbours)
    crashes = {part: count - restarts(before)[part] for part, count in restarts(after).items()}
    for stream in neighbours:
        counts = f"{stream.runs} streams, {stream.refused} refused by a full queue, {len(stream.changed)} changed"
        console.print(f"{stream.name}: {counts}", *stream.changed[:1], markup=False)
    faults = f"restarts: {crashes}; hangs: {tally.hangs or 'none'}; faults: {tally.faults or 'none'}"
    console.print(f"{faults}; answers at the end: {answers}", markup=False)
    keys = ("name", "runs", "refused", "changed")
    report = {
        "bundle": ports.bundle.name, "requests": requests, "first": first, "seed": seed, "clients": clients,
        "seconds": seconds, "outcomes": tally.outcomes, "hangs": tally.hangs, "faults": tally.faults,
        "restarts": crashes, "streams": [{key: getattr(one, key) for key in keys} for one in neighbours],
        "answers": answers,
    }  # fmt: skip
    finish(output, report, table(tally))
    failed = tally.hangs or tally.faults or any(crashes.values()) or any(stream.changed for stream in neighbours)
    return 0 if answers and not failed else 1


if __name__ == "__main__":
    run(main)
