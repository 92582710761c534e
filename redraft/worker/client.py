"""Client of an engine worker: thread-safe, streams chunks, notices when the worker dies."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from redraft.errors import Code, RequestError
from redraft.request import MAX_MESSAGE_BYTES, PROTOCOL_LIMITS, GenerateRequest, PromptLimits, joined
from redraft.worker.protocol import (
    CHUNK,
    SHUTTING_DOWN,
    STARTING,
    STOPPING,
    Chunk,
    ErrorMessage,
    ReplacedRequest,
    StatusRequest,
    WorkerStatus,
    pack,
    unpack,
)

WorkerMessage = Chunk | ErrorMessage
NOT_THERE = "the engine worker is restarting or not running: try again shortly"
CLOSED = "this front end is shutting down"
WENT_AWAY = "the engine worker went away while it served this request: try again shortly"
_NUMBERS = itertools.count()
_CLOSE, _GENERATE, _CANCEL, _STATUS, _REPLACED = b"", b"generate", b"cancel", b"status", b"replaced"
"""What a client's thread is asked to send."""


class WorkerError(RequestError):
    """A request that the worker refused, or lost."""


class _Link:
    """The connection to one worker. It makes itself anew when the worker goes away."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str):
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.IMMEDIATE, 1)
        self.dealer.setsockopt(zmq.SNDHWM, 0)
        self.dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        self.dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        self.monitor = self.dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        )
        self.dealer.connect(address)
        self.up = False
        self.held: list[bytes] = []
        """Messages that wait for the connection."""
        self.questions: deque[queue.SimpleQueue[WorkerStatus | None]] = deque()
        """Who waits for a status, in the order of the questions."""

    def close(self) -> None:
        self.dealer.disable_monitor()
        self.dealer.close(linger=0)


class WorkerClient:
    """Talks to the worker bound at `socket_path`. Any thread may call any method.

    One background thread owns the connection. When the worker goes away, every request in flight fails with code
    UNAVAILABLE, and so do new ones until a worker is there again; the client reconnects by itself. When another worker
    takes the worker's place, requests in flight go on, and new ones go to the other worker.
    """

    def __init__(self, socket_path: str | Path):
        self.prompt_limits = PROTOCOL_LIMITS
        """The protocol's, until a worker has told its own."""
        self._address = f"ipc://{socket_path}"
        self._starting_file, self._stopping_file = map(Path(socket_path).with_name, (STARTING, STOPPING))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._handlers: dict[str, Callable[[WorkerMessage], None]] = {}
        self._questions: queue.SimpleQueue[queue.SimpleQueue[WorkerStatus | None]] = queue.SimpleQueue()
        """Those that the thread has yet to ask."""
        self._links: list[_Link] = []
        """The last one is to the worker that takes new requests. The thread's own."""
        self._link_of: dict[str, _Link] = {}
        """Where the requests in flight are. The thread's own."""
        self._cancelled: set[str] = set()
        """Those among them that are to be cancelled."""
        self._poller = zmq.Poller()
        self._connected = threading.Event()
        self._closed = False
        wake_address = f"inproc://redraft-client-{next(_NUMBERS)}"
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(wake_address)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._outbox.connect(wake_address)
        self._thread = threading.Thread(target=self._run, name="redraft-client", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether a worker is there now."""
        return self._connected.is_set()

    @property
    def starting(self) -> bool:
        """Whether the worker's service has yet to answer its first request."""
        return self._starting_file.exists()

    @property
    def stopping(self) -> bool:
        """Whether the worker's service is being stopped."""
        return self._stopping_file.exists()

    def wait_connected(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a worker; whether there is one."""
        return self._connected.wait(timeout)

    def new_id(self) -> str:
        """A request id that this client has not used."""
        return f"r{next(self._ids)}"

    def submit(self, request: GenerateRequest, on_message: Callable[[WorkerMessage], None]) -> None:
        """Send a request, without fields that are as by default, which an older worker may not know. `on_message` gets
        its chunks and errors, in order, on the client's own thread: it must not block. The last message is an
        ErrorMessage or a Chunk with `done`.

        Raises WorkerError: UNAVAILABLE when there is no worker, INVALID_REQUEST for a message that is too large.
        """
        data = pack({"op": request.op} | request.model_dump(exclude_defaults=True, exclude_none=True))
        if len(data) > MAX_MESSAGE_BYTES:
            raise WorkerError(f"the request has {len(data)} bytes: expected at most {MAX_MESSAGE_BYTES}")
        with self._lock:
            self._require_worker()
            if request.id in self._handlers:
                raise ValueError(f"request id {request.id!r} is in use")
            self._handlers[request.id] = on_message
            self._tell(_GENERATE, request.id, data)

    def generate(self, request: GenerateRequest, timeout: float | None = None) -> Iterator[Chunk]:
        """Yield the request's chunks; abandoning the iterator cancels the request.

        Raises WorkerError: with the worker's code, UNAVAILABLE when it went away, or INTERNAL when no message came for
        `timeout` seconds.
        """
        messages: queue.SimpleQueue[WorkerMessage] = queue.SimpleQueue()
        self.submit(request, messages.put)
        ended = False
        try:
            while not ended:
                try:
                    message = messages.get(timeout=timeout)
                except queue.Empty:
                    raise WorkerError(f"no answer from the worker for {timeout} s", Code.INTERNAL) from None
                if isinstance(message, ErrorMessage):
                    ended = True
                    raise WorkerError(message.message, message.code)
                ended = message.done
                yield message
        finally:
            if not ended:
                self.cancel(request.id)

    def complete(self, request: GenerateRequest, timeout: float | None = None) -> Chunk:
        """The whole answer as one chunk."""
        chunks = list(self.generate(request, timeout))
        return replace(chunks[-1], **joined(chunks))

    def cancel(self, request_id: str) -> None:
        """Stop a request; its handler still gets a last chunk with finish reason "cancelled", unless it had ended."""
        with self._lock:
            if not self._closed:
                self._tell(_CANCEL, request_id, _cancellation(request_id))

    def status(self, timeout: float = 5.0, metrics: bool = False) -> WorkerStatus:
        """The worker's state, with its `metrics` where asked for.

        Raises WorkerError UNAVAILABLE when it is not there or silent for `timeout` seconds.
        """
        answer: queue.SimpleQueue[WorkerStatus | None] = queue.SimpleQueue()
        with self._lock:
            self._require_worker()
            self._questions.put(answer)
            self._tell(_STATUS, "", pack(StatusRequest(metrics=metrics)))
        try:
            status = answer.get(timeout=timeout)
        except queue.Empty:
            status = None
        if status is None:
            raise WorkerError(f"the worker did not answer a status request within {timeout} s", Code.UNAVAILABLE)
        return status

    def replaced(self, seconds: float) -> None:
        """Tell the worker that another one listens at the socket's path now; its requests have so long to end. Raises
        WorkerError UNAVAILABLE when there is no worker."""
        with self._lock:
            self._require_worker()
            self._tell(_REPLACED, "", pack(ReplacedRequest(seconds=seconds)))

    def close(self) -> None:
        """Disconnect; requests in flight fail with code UNAVAILABLE. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tell(_CLOSE, "", b"")
        self._thread.join()
        self._outbox.close(linger=0)

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_worker(self) -> None:
        if self._closed:
            raise WorkerError(CLOSED, Code.UNAVAILABLE)
        if not self._connected.is_set():
            raise WorkerError(self._unless_stopping(NOT_THERE), Code.UNAVAILABLE)

    def _unless_stopping(self, text: str) -> str:
        """Why the worker does not answer: `text`, but where the service is being stopped."""
        return SHUTTING_DOWN if self.stopping else text

    def _tell(self, what: bytes, request_id: str, data: bytes) -> None:
        """Have the thread send a message; the caller holds the lock."""
        self._outbox.send_multipart([what, request_id.encode(), data])

    def _run(self) -> None:
        self._poller.register(self._inbox, zmq.POLLIN)
        self._connect()
        running = True
        while running:
            ready = dict(self._poller.poll())
            for link in list(self._links):
                if link.dealer in ready:
                    self._receive(link)
                if link.monitor in ready:
                    self._follow(link, recv_monitor_message(link.monitor)["event"])
            for link in self._links[:-1]:  # to replaced workers, which wait for their clients to leave
                if not (link.questions or link in self._link_of.values()):
                    self._leave(link)
            if self._inbox in ready:
                what, request_id, data = self._inbox.recv_multipart()
                running = what != _CLOSE
                if running:
                    self._send(what, request_id.decode(), data)
        for link in list(self._links):
            self._leave(link, CLOSED)
        self._fail(list(self._handlers), CLOSED)
        self._inbox.close(linger=0)

    def _connect(self) -> None:
        link = _Link(self._context, self._address)
        for socket in (link.dealer, link.monitor):
            self._poller.register(socket, zmq.POLLIN)
        self._links.append(link)

    def _leave(self, link: _Link, reason: str = "") -> None:
        """Close a connection; what is still in flight there fails."""
        self._lose(link, reason)
        self._links.remove(link)
        for socket in (link.dealer, link.monitor):
            self._poller.unregister(socket)
        link.close()

    def _receive(self, link: _Link) -> None:
        while True:
            try:
                message = unpack(link.dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._dispatch(link, message)

    def _dispatch(self, link: _Link, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "status":
            status = WorkerStatus.model_validate(message)
            with contextlib.suppress(KeyError):  # a worker of another version
                self.prompt_limits = PromptLimits.of(status.limits)
            if link.questions:
                link.questions.popleft().put(status)
        elif op == "chunk":
            self._deliver(CHUNK.validate_python(message), last=bool(message.get("done")))
        elif op == "error":
            self._deliver(ErrorMessage.model_validate(message), last=True)
        elif op == "moved":
            self._move(link, message.get("message"))

    def _deliver(self, message: WorkerMessage, last: bool) -> None:
        with self._lock:
            handler = self._handlers.pop(message.id, None) if last else self._handlers.get(message.id)
        if last:
            self._link_of.pop(message.id, None)
            self._cancelled.discard(message.id)
        if handler:
            handler(message)

    def _move(self, link: _Link, data: bytes | None) -> None:
        """Another worker listens at the path: connect to it, and send what this one has given back there."""
        if link is self._links[-1]:
            self._connect()
        if data is None:
            return
        message = unpack(data)
        if message["op"] == "status" and link.questions:
            self._questions.put(link.questions.popleft())
            self._send(_STATUS, "", data)
        elif message["op"] == "generate":
            request_id = message["id"]
            self._send(_GENERATE, request_id, data)
            if request_id in self._cancelled:  # which came too late as well
                self._send(_CANCEL, request_id, _cancellation(request_id))

    def _follow(self, link: _Link, event: int) -> None:
        """Act on a connection's event: it is up, it was lost, or another try to connect failed."""
        newest = link is self._links[-1]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            link.up = True
            # First for the limits. Nobody waits for the answer, but it comes before those to questions that were held.
            link.questions.appendleft(queue.SimpleQueue())
            for data in (pack(StatusRequest()), *link.held):
                self._pass_on(link, data)
            link.held.clear()
            if newest:
                self._connected.set()
        elif event == zmq.EVENT_DISCONNECTED:
            link.up = False
            self._receive(link)  # last messages came before the end, and a request that has them has not failed
            text = self._unless_stopping(WENT_AWAY)
            if link is not self._links[-1]:
                self._leave(link, text)
            else:
                self._connected.clear()
                self._lose(link, text)
        elif newest and not link.up:  # there is no worker
            self._connected.clear()
            self._lose(link, self._unless_stopping(NOT_THERE))

    def _send(self, what: bytes, request_id: str, data: bytes) -> None:
        """Send a message to the worker that it is for: a cancellation to the one that has the request, all else to the
        newest one."""
        link = self._links[-1]
        if what == _CANCEL:
            if request_id not in self._link_of:  # it has ended meanwhile
                return
            self._cancelled.add(request_id)  # kept: a replaced worker may still give the request back, see `_move`
            link = self._link_of[request_id]
        elif what == _GENERATE:
            # A request that a replaced worker gave back is still noted with that one's link. If it has ended meanwhile,
            # its handler is gone: nobody waits for the new worker's answer.
            self._link_of.pop(request_id, None)
            if request_id not in self._handlers:
                return
            self._link_of[request_id] = link
        elif what == _STATUS:
            link.questions.append(self._questions.get())
        # Without a worker at all the send fails at once, and so does the request. During a swap the new worker's
        # connection is in the making while the old one still counts as connected: the message waits for it.
        if link.up or not self._connected.is_set():
            self._pass_on(link, data)
        else:
            link.held.append(data)

    def _pass_on(self, link: _Link, data: bytes) -> None:
        try:
            link.dealer.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self._lose(link, self._unless_stopping(NOT_THERE))

    def _lose(self, link: _Link, reason: str) -> None:
        """Fail what is in flight on a connection."""
        self._fail([request_id for request_id, used in self._link_of.items() if used is link], reason)
        link.held.clear()
        while link.questions:
            link.questions.popleft().put(None)

    def _fail(self, request_ids: list[str], reason: str) -> None:
        for request_id in request_ids:
            self._deliver(ErrorMessage(id=request_id, code=Code.UNAVAILABLE, message=reason), last=True)


def _cancellation(request_id: str) -> bytes:
    return pack({"op": "cancel", "id": request_id})
