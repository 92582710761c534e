"""The engine worker: one process that owns an engine and serves clients over a local ZeroMQ socket.

`python -m redraft.worker.server --bundle PATH --socket PATH`; a worker that is started by hand takes all else from
variables such as REDRAFT_THREADS. One thread does it all: messages are taken between steps, and only what is slow to
encode (long texts, many words) or to compile (a guide) goes to a helper thread, so that no request delays a step.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from redraft import logs
from redraft.drafting.served import TextOptions
from redraft.engines.ranks import process as rank_process
from redraft.errors import Code, RequestError
from redraft.grammar.trial import QUICK_S, TakesLonger
from redraft.output import Output
from redraft.request import (
    GENERATED,
    MAX_MESSAGE_BYTES,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    SequenceStats,
    shown,
)
from redraft.request_state import RequestState
from redraft.runtime import Runtime
from redraft.scheduling.scheduler import Overloaded
from redraft.serving.settings import ServeSettings, TextScope, process_settings
from redraft.worker.fair import FairExecutor
from redraft.worker.protocol import (
    SHUTTING_DOWN,
    CancelRequest,
    ReplacedRequest,
    WorkerStatus,
    pack,
    parse_request,
    unpack,
)

IDLE_WAIT_MS = 200
PARENT_CHECK_S = 1.0
FIRST_KEEP_S, KEEP_S = 60.0, 600.0
"""What was learned of the engine and the traffic is written after the first, then every so often, and at the end."""
RECEIVE_S, RECEIVE_SHARE = 0.002, 0.25
"""Between two steps messages are taken for so long, or for this share of the time of a step."""
MAX_UNSENT = 100_000
FAREWELL_S = 0.2
"""A worker that ends leaves clients so long to read its last messages, which ZeroMQ drops with the connection."""
LATECOMERS_S = 0.5
"""A worker that has been replaced waits at least so long: a client may have found its socket a moment before."""
INLINE_CHARACTERS = 4000
INLINE_WORDS = 16

Key = tuple[bytes, str]

log = logging.getLogger("redraft.worker")


class Encoding(NamedTuple):
    """A request that a helper thread encodes or will encode."""

    request: GenerateRequest
    arrived: float
    future: Future[RequestState]
    compiles: bool
    """Whether its guide is compiled, too."""

    @property
    def late(self) -> bool:
        """Whether its deadline has passed."""
        timeout_s = self.request.timeout_s
        return timeout_s is not None and time.perf_counter() >= self.arrived + timeout_s


def _client(key: Key, request: GenerateRequest) -> Hashable:
    """Whose request it is: the client that it names, else the process that sent it."""
    return request.client or key[0]


class Worker:
    """Serves a runtime's requests on a socket until it is drained or stopped (from a signal handler or another thread).

    With `max_per_client`, of the requests that name a client, no more of one client's run and wait.
    """

    def __init__(self, runtime: Runtime, socket_path: str | Path, max_per_client: int | None = None):
        self._runtime = runtime
        self._path = Path(socket_path)
        self._max_per_client = max_per_client
        self._active: dict[Key, RequestState | Encoding] = {}
        self._encoder = ThreadPoolExecutor(1, "redraft-encode")
        # What a guide needs shows in compiling it: one that is not ready soon goes on beside the others.
        self._compiler, self._slow_compiler = FairExecutor("redraft-compile"), FairExecutor("redraft-compile-slow")
        self._stopping = False
        self._drained_by: float | None = None
        self._replaced_at: float | None = None
        self._clients: set[bytes] = set()  # that have sent something, and are not known to be gone
        self._connections: set[int] = set()
        self._step_s = 0.0
        self._router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._monitor: zmq.Socket[bytes] = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._router.bind(f"ipc://{self._path}")
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def stop(self) -> None:
        """Make `run` return after the current step. Requests that run or wait fail."""
        self._stopping = True

    def drain(self, seconds: float) -> None:
        """Refuse new requests, and make `run` return when the others have ended, or after so many seconds."""
        self._drained_by = time.monotonic() + seconds

    def run(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Serve until stopped, or until `alive`, asked about once a second, says False."""
        next_check, next_keep = 0.0, time.monotonic() + FIRST_KEEP_S
        scheduler = self._runtime.scheduler
        try:
            while not self._stopping:
                self._receive()
                self._collect_encoded()
                if not scheduler.idle:
                    started = time.perf_counter()
                    scheduler.step_and_send(self._send_outputs)
                    self._step_s = time.perf_counter() - started
                now = time.monotonic()
                if self._is_drained(now):
                    break
                if now > next_keep:
                    next_keep = now + KEEP_S
                    self._runtime.keep_learned()
                    self._runtime.keep_texts()
                if now > next_check:
                    next_check = now + PARENT_CHECK_S
                    if not alive():
                        break
        except Exception as error:
            self._fail_all(Code.INTERNAL, f"the engine worker failed: {error}")
            raise
        finally:
            self._fail_all(Code.UNAVAILABLE, SHUTTING_DOWN)
            self._close()

    def _is_drained(self, now: float) -> bool:
        """Whether it may end. A replaced worker waits for its clients to leave: a request may be on its way. A client
        that found the socket a moment before the swap may not have connected yet, hence LATECOMERS_S."""
        if self._drained_by is None or now > self._drained_by:
            return self._drained_by is not None
        awaited = self._replaced_at is not None and (self._connections or now < self._replaced_at + LATECOMERS_S)
        return not (self._active or awaited)

    def _close(self) -> None:
        self._encoder.shutdown(wait=False, cancel_futures=True)
        self._compiler.shutdown()
        self._slow_compiler.shutdown()
        time.sleep(FAREWELL_S)
        self._router.disable_monitor()
        self._router.close(linger=500)
        self._path.unlink(missing_ok=True)

    def _receive(self) -> None:
        wait = 0 if not self._runtime.scheduler.idle else 1 if self._encoding() else IDLE_WAIT_MS
        ready = dict(self._poller.poll(wait))
        if self._router in ready:
            deadline = time.perf_counter() + max(RECEIVE_S, RECEIVE_SHARE * self._step_s)
            while time.perf_counter() < deadline:
                try:
                    client, *frames = self._router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._clients.add(client)
                self._handle(client, b"".join(frames))
        if self._monitor in ready:
            message = recv_monitor_message(self._monitor)
            if message["event"] == zmq.EVENT_ACCEPTED:
                self._connections.add(message["value"])
            else:
                self._connections.discard(message["value"])
                # A closed connection has no name, so all clients are sent something: to those that are gone it fails,
                # and they are forgotten with their requests.
                for client in list(self._clients):
                    self._send(client, {"op": "probe"})

    def _handle(self, client: bytes, data: bytes) -> None:
        request_id = ""
        try:
            message = unpack(data)
            if isinstance(message, dict) and isinstance(message.get("id"), str):
                request_id = message["id"]
            request = parse_request(message)
            if isinstance(request, ReplacedRequest):
                self._give_way(request.seconds)
            elif self._replaced_at is not None and (client, request_id) not in self._active:
                self._send(client, {"op": "moved", "message": data})
            elif isinstance(request, GenerateRequest):
                self._generate((client, request.id), request)
            elif isinstance(request, CancelRequest):
                self._cancel((client, request.id))
            else:
                self._send_status(client, request.metrics)
        except Exception as error:
            self._refuse((client, request_id), error)

    def _give_way(self, seconds: float) -> None:
        """Let another worker have all but the requests that are here."""
        self._replaced_at = time.monotonic()
        self.drain(seconds)
        for client in list(self._clients):
            self._send(client, {"op": "moved"})

    def _generate(self, key: Key, request: GenerateRequest) -> None:
        arrived = time.perf_counter()
        if self._drained_by is not None:
            raise RequestError(SHUTTING_DOWN, Code.UNAVAILABLE)
        if key in self._active:
            raise InvalidRequest(f"id: {request.id!r} is in use by a request that is still running")
        self._runtime.scheduler.require_room()  # before anything is encoded for a queue that is full
        self._require_share(request.client)
        grammar = None if request.guide is None else self._runtime.grammars.cached(request.guide)
        compiles = request.guide is not None and grammar is None
        words = [*request.stop_words, *request.bad_words, *request.stop_word_ids, *request.bad_word_ids]
        if not compiles and len(request.text or "") <= INLINE_CHARACTERS and len(words) <= INLINE_WORDS:
            self._submit(key, self._runtime.sequence(key, request, arrived, grammar))
            return
        self._runtime.check(request)  # now, not when a thread comes to it
        self._require_room_to_encode(key, request, compiles)
        if compiles:
            args = key, request, arrived, None, QUICK_S
            future = self._compiler.submit(_client(key, request), self._runtime.sequence, *args)
        else:
            future = self._encoder.submit(self._runtime.sequence, key, request, arrived, grammar)
        self._active[key] = Encoding(request, arrived, future, compiles)

    def _require_room_to_encode(self, key: Key, request: GenerateRequest, compiles: bool) -> None:
        """Raises Overloaded where `max_queue` requests wait to be encoded, or to be compiled. Among those to compile,
        the last one of the client that has most of them makes room for another client's."""
        waiting = [other for other in self._encoding() if cast(Encoding, self._active[other]).compiles == compiles]
        if len(waiting) < self._runtime.limits.max_queue:
            return
        overloaded = Overloaded(f"overloaded: {len(waiting)} requests wait to be encoded: try again later")
        clients = Counter(_client(other, self._active[other].request) for other in waiting)
        client, count = clients.most_common(1)[0]
        # Only compiling takes so long that one client's guides keep others out. Who would have as many as the busiest
        # client after the exchange gains nothing for fairness, and the two would throw each other out in turn.
        if not compiles or count <= clients[_client(key, request)] + 1:
            raise overloaded
        last = [other for other in waiting if _client(other, self._active[other].request) == client][-1]
        cast(Encoding, self._active.pop(last)).future.cancel()
        self._refuse(last, overloaded)

    def _require_share(self, client: str | None) -> None:
        """Raises Overloaded where a client has as many requests as it may."""
        if client is None or self._max_per_client is None:
            return
        if sum(active.request.client == client for active in self._active.values()) >= self._max_per_client:
            raise Overloaded(
                f"overloaded: client {shown(client)} has {self._max_per_client} requests already, the most that "
                "--max-per-client allows: try again later"
            )

    def _submit(self, key: Key, sequence: RequestState) -> None:
        self._runtime.scheduler.submit(sequence)
        self._active[key] = sequence

    def _encoding(self) -> list[Key]:
        return [key for key, active in self._active.items() if isinstance(active, Encoding)]

    def _collect_encoded(self) -> None:
        for key in self._encoding():
            encoding = self._active.get(key)
            if not isinstance(encoding, Encoding):
                continue  # sending to its client has shown that it is gone
            if encoding.future.done():
                del self._active[key]
                try:
                    self._submit(key, encoding.future.result())
                except TakesLonger:
                    args = key, encoding.request, encoding.arrived
                    future = self._slow_compiler.submit(_client(key, encoding.request), self._runtime.sequence, *args)
                    self._active[key] = encoding._replace(future=future)
                except Exception as error:
                    self._refuse(key, error)
            elif encoding.late:
                self._end_encoding(key, encoding, "timeout")

    def _end_encoding(self, key: Key, encoding: Encoding, reason: FinishReason) -> None:
        encoding.future.cancel()
        del self._active[key]
        stats = SequenceStats(queue_ms=1e3 * (time.perf_counter() - encoding.arrived))
        self._runtime.scheduler.metrics.count_end(reason, stats)
        message = {"op": "chunk", "id": key[1], "done": True, "finish_reason": reason, "stats": asdict(stats)}
        self._send(key[0], message)

    def _cancel(self, key: Key) -> None:
        if isinstance(encoding := self._active.get(key), Encoding):
            self._end_encoding(key, encoding, "cancelled")
        else:
            self._runtime.scheduler.cancel(key)

    def _send_outputs(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._send_output(output)

    def _send_output(self, output: Output) -> None:
        key = cast(Key, output.key)
        client, request_id = key
        if output.error is not None:
            self._active.pop(key, None)
            self._send_error(key, Code.INVALID_REQUEST, output.error)
            return
        message: dict[str, Any] = {"op": "chunk", "id": request_id, "prompt_tokens": output.prompt_tokens}
        message |= {name: value for name in GENERATED if (value := getattr(output, name)) is not None}
        if output.draft_trees is not None:
            message["draft_trees"] = list(map(vars, output.draft_trees))
        if output.stats is not None:
            message["stats"] = asdict(output.stats)
        if output.finish_reason:
            self._active.pop(key, None)
            message["done"] = True
        self._send(client, message)

    def _refuse(self, key: Key, error: Exception) -> None:
        """Answer a request that failed before it reached the engine, which serves the others on."""
        if isinstance(error, RequestError):
            self._send_error(key, error.code, error.message)
        else:
            log.error("a request failed", exc_info=error)
            self._send_error(key, Code.INTERNAL, "the engine worker failed on this request: worker.log has the cause")

    def _send_error(self, key: Key, code: Code, text: str) -> None:
        self._send(key[0], {"op": "error", "id": key[1], "code": code, "message": text})

    def _send_status(self, client: bytes, metrics: bool) -> None:
        limits, prompt = self._runtime.limits, self._runtime.prompt_limits
        status = WorkerStatus(ready=self._drained_by is None, **vars(self._runtime.scheduler.status()))
        status.limits = {**vars(limits), "vocab_size": self._runtime.vocab_size, "text_bytes": prompt.text_bytes}
        if self._max_per_client is not None:
            status.limits["max_per_client"] = self._max_per_client
        if metrics:
            status.metrics = self._runtime.scheduler.metrics.page().decode()
        status.bundle, status.pid = self._runtime.name, os.getpid()
        self._send(client, status.model_dump())

    def _send(self, client: bytes, message: dict[str, Any]) -> None:
        """Send without waiting; a client that is gone, or that stopped reading, loses its requests."""
        try:
            self._router.send_multipart([client, pack(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._forget(client)

    def _forget(self, client: bytes) -> None:
        self._clients.discard(client)
        for key in [key for key in self._active if key[0] == client]:
            if isinstance(active := self._active.pop(key), Encoding):
                active.future.cancel()
            else:
                self._runtime.scheduler.cancel(key)

    def _fail_all(self, code: Code, text: str) -> None:
        for client, request_id in list(self._active):
            self._send(client, {"op": "error", "id": request_id, "code": code, "message": text})
        self._active.clear()


def main(argv: list[str] | None = None) -> int:
    """Load a bundle and serve it; the exit status is 2 where the bundle cannot be served."""
    parser = argparse.ArgumentParser(prog="python -m redraft.worker.server", description=__doc__.split("\n")[0])
    parser.add_argument("--bundle", type=Path, required=True, help="Folder of the engine bundle")
    parser.add_argument("--socket", type=Path, required=True, help="Path of the socket to bind")
    parser.add_argument("--outlive-parent", action="store_true", help="Go on when the process that started it is gone")
    options = parser.parse_args(argv)
    logs.configure("redraft worker: %(message)s")
    parent = os.getppid()
    settings = process_settings()
    try:
        runtime = Runtime.load(
            options.bundle,
            settings.threads,
            settings.max_queue,
            settings.stream_interval_ms / 1e3,
            settings.prefix_reuse,
            settings.learned_dir,
            text_options(settings),
        )
        if settings.learning:
            runtime.store_answers(settings.learning)
    except (ValueError, OSError, RuntimeError) as error:
        log.error("%s", error)
        rank_process.end_all(2)
        return 2
    except KeyboardInterrupt:
        return 130
    serve(runtime, options.socket, None if options.outlive_parent else parent, settings)
    return 0


def text_options(settings: ServeSettings) -> TextOptions:
    """How served texts are stored."""
    capacity = 0 if settings.served_texts is TextScope.off else settings.served_tokens
    return TextOptions(settings.served_texts is TextScope.key, capacity, settings.served_dir)


def serve(
    runtime: Runtime, socket_path: Path, parent: int | None = None, settings: ServeSettings | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, or until `parent` is no longer this process's parent; then free the engine.

    After the first signal requests have `settings.drain_s` seconds to end; a second one ends them at once.
    """
    settings = settings or ServeSettings()
    gc.collect()
    gc.freeze()
    worker = Worker(runtime, socket_path, settings.max_per_client)
    signals = (signal.SIGTERM, signal.SIGINT)

    def end(*_: object) -> None:
        worker.drain(settings.drain_s)
        for number in signals:
            signal.signal(number, lambda *_: worker.stop())

    for number in signals:
        signal.signal(number, end)
    try:
        worker.run(alive=lambda: parent is None or os.getppid() == parent)
    finally:
        with ExitStack() as ends:  # the last first, and all of them whichever fails
            ends.callback(runtime.engine.close)
            ends.callback(runtime.end_storing)
            runtime.keep_learned()


if __name__ == "__main__":
    sys.exit(main())
