"""Client of an engine worker: thread-safe, streams chunks, notices when the worker dies."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from redraft.request import MAX_MESSAGE_BYTES, PROTOCOL_LIMITS, GenerateRequest, PromptLimits, joined_extras
from redraft.worker.protocol import CANCELLED, INVALID, RESTARTING, Chunk, ErrorMessage, WorkerStatus, pack, unpack

Message = Chunk | ErrorMessage
_NUMBERS = itertools.count()


class WorkerError(RuntimeError):
    """A request that ended without a result; `code` is one of the codes of `redraft.worker.protocol`."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class WorkerClient:
    """Talks to the worker bound at `socket_path`. Any thread may call any method.

    One background thread owns the connection. When the worker goes away, every request in flight fails with code
    "restarting", and so do new ones until a worker is there again; the client reconnects by itself.
    """

    def __init__(self, socket_path: str | Path, context: zmq.Context[zmq.Socket[bytes]] | None = None):
        self.prompt_limits = PROTOCOL_LIMITS
        """The protocol's, until a worker has told its own."""
        self._address = f"ipc://{socket_path}"
        self._context = context or zmq.Context.instance()
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._handlers: dict[str, Callable[[Message], None]] = {}
        self._status_waiters: list[queue.SimpleQueue[WorkerStatus | None]] = []
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

    def wait_connected(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a worker; whether there is one."""
        return self._connected.wait(timeout)

    def new_id(self) -> str:
        """A request id that this client has not used."""
        return f"r{next(self._ids)}"

    def submit(self, request: GenerateRequest, on_message: Callable[[Message], None]) -> None:
        """Send a request, without fields that are as by default, which an older worker may not know. `on_message` gets
        its chunks and errors, in order, on the client's own thread: it must not block. The last message is an
        ErrorMessage or a Chunk with `done`.

        Raises WorkerError "restarting" when there is no worker, "invalid" for a message that is too large to send.
        """
        data = pack({"op": request.op} | request.model_dump(exclude_defaults=True, exclude_none=True))
        if len(data) > MAX_MESSAGE_BYTES:
            raise WorkerError(INVALID, f"the request has {len(data)} bytes: expected at most {MAX_MESSAGE_BYTES}")
        with self._lock:
            self._require_worker()
            if request.id in self._handlers:
                raise ValueError(f"request id {request.id!r} is in use")
            self._handlers[request.id] = on_message
            self._outbox.send(data)

    def generate(self, request: GenerateRequest, timeout: float | None = None) -> Iterator[Chunk]:
        """Yield the request's chunks; abandoning the iterator cancels the request.

        Raises WorkerError: the worker's own code, or "restarting" when it went away, or "internal" when no message
        came for `timeout` seconds.
        """
        messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.submit(request, messages.put)
        ended = False
        try:
            while not ended:
                try:
                    message = messages.get(timeout=timeout)
                except queue.Empty:
                    raise WorkerError("internal", f"no answer from the worker for {timeout} s") from None
                if isinstance(message, ErrorMessage):
                    ended = True
                    raise WorkerError(message.code, message.message)
                ended = message.done
                yield message
        finally:
            if not ended:
                self.cancel(request.id)

    def complete(self, request: GenerateRequest, timeout: float | None = None) -> Chunk:
        """The whole answer as one chunk: all text, tokens and `EXTRAS`, and the statistics."""
        chunks = list(self.generate(request, timeout))
        return chunks[-1].model_copy(
            update={
                "text": "".join(chunk.text for chunk in chunks),
                "token_ids": [token for chunk in chunks for token in chunk.token_ids],
            }
            | joined_extras(chunks)
        )

    def cancel(self, request_id: str) -> None:
        """Stop a request; its handler still gets a last chunk with finish reason "cancelled", unless it had ended."""
        with self._lock:
            if not self._closed and self._connected.is_set():
                self._outbox.send(pack({"op": "cancel", "id": request_id}))

    def status(self, timeout: float = 5.0) -> WorkerStatus:
        """The worker's state. Raises WorkerError "restarting" when it is not there or silent for `timeout` seconds."""
        answer: queue.SimpleQueue[WorkerStatus | None] = queue.SimpleQueue()
        with self._lock:
            self._require_worker()
            self._status_waiters.append(answer)
            self._outbox.send(pack({"op": "status"}))
        try:
            status = answer.get(timeout=timeout)
        except queue.Empty:
            status = None
        if status is None:
            raise WorkerError(RESTARTING, f"the worker did not answer a status request within {timeout} s")
        return status

    def close(self) -> None:
        """Disconnect; requests in flight fail with code "cancelled". Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._outbox.send(b"")
        self._thread.join()
        self._outbox.close(linger=0)

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_worker(self) -> None:
        if self._closed:
            raise WorkerError(CANCELLED, "the client is closed")
        if not self._connected.is_set():
            raise WorkerError(RESTARTING, "the engine worker is restarting or not running: try again shortly")

    def _run(self) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        dealer.connect(self._address)
        poller = zmq.Poller()
        for socket in (dealer, monitor, self._inbox):
            poller.register(socket, zmq.POLLIN)
        running = True
        while running:
            ready = dict(poller.poll())
            if dealer in ready:
                self._receive(dealer)
            if monitor in ready:
                self._follow(recv_monitor_message(monitor)["event"], dealer)
            if self._inbox in ready:
                running = self._send(dealer)
        self._fail_all(CANCELLED, "the client was closed")
        dealer.disable_monitor()
        dealer.close(linger=0)
        self._inbox.close(linger=0)

    def _receive(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                message = unpack(dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._dispatch(message)

    def _dispatch(self, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "status":
            with self._lock:
                waiter = self._status_waiters.pop(0) if self._status_waiters else None
            status = WorkerStatus.model_validate(message)
            with contextlib.suppress(KeyError):  # a worker of another version
                self.prompt_limits = PromptLimits.of(status.limits)
            if waiter:
                waiter.put(status)
        elif op == "chunk":
            self._deliver(Chunk.model_validate(message), last=bool(message.get("done")))
        elif op == "error":
            self._deliver(ErrorMessage.model_validate(message), last=True)

    def _deliver(self, message: Message, last: bool) -> None:
        with self._lock:
            handler = self._handlers.pop(message.id, None) if last else self._handlers.get(message.id)
        if handler:
            handler(message)

    def _follow(self, event: int, dealer: zmq.Socket[bytes]) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected.set()
            with contextlib.suppress(zmq.Again):
                dealer.send(pack({"op": "status"}), zmq.NOBLOCK)  # for the limits; no waiter needs the answer
        elif event == zmq.EVENT_DISCONNECTED:
            self._connected.clear()
            self._receive(dealer)
            self._fail_all(RESTARTING, "the engine worker went away while it served this request: try again shortly")

    def _send(self, dealer: zmq.Socket[bytes]) -> bool:
        data = self._inbox.recv()
        if not data:
            return False
        try:
            dealer.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self._fail_all(RESTARTING, "the engine worker is restarting or not running: try again shortly")
        return True

    def _fail_all(self, code: str, text: str) -> None:
        with self._lock:
            handlers, self._handlers = self._handlers, {}
            waiters, self._status_waiters = self._status_waiters, []
        for request_id, handler in handlers.items():
            handler(ErrorMessage(id=request_id, code=code, message=text))
        for waiter in waiters:
            waiter.put(None)


def wait_for_worker(socket_path: str | Path, timeout: float) -> WorkerStatus:
    """Status of the worker at `socket_path` once it answers. Raises TimeoutError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    with WorkerClient(socket_path) as client:
        while (left := deadline - time.monotonic()) > 0:
            if client.wait_connected(min(left, 0.2)):
                try:
                    return client.status(timeout=min(left, 2.0))
                except WorkerError:
                    continue
    raise TimeoutError(f"no engine worker answered at {socket_path} within {timeout} s")
