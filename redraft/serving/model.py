"""What both Triton models do: check a request, hand it to the worker, stream the answer back.

Imported inside Triton's Python backend only. Requests run side by side: `execute` returns at once, and one thread sends
every response and passes cancellations on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from redraft.request import GenerateRequest, InvalidRequest
from redraft.serving.fields import Contract
from redraft.serving.metrics import LatencyMetrics, RestartMetrics, WorkerMetrics
from redraft.worker import protocol
from redraft.worker.client import Message, WorkerClient, WorkerError
from redraft.worker.protocol import Chunk, ErrorMessage, WorkerStatus

CANCELLATION_POLL_S = 0.02
CANCELLATIONS_PER_POLL = 8
STATUS_POLL_S = 0.5

_ERROR_CODES = {  # names: Triton adds its part of pb_utils only after this module has been imported
    protocol.INVALID: "INVALID_ARG",
    protocol.OVERLOADED: "UNAVAILABLE",
    protocol.RESTARTING: "UNAVAILABLE",
    protocol.CANCELLED: "CANCELLED",
}
_INTERNAL_ERROR = "internal error: the Triton server's log has the cause"


class Exchange:
    """One request in flight: where its responses go, and what has been produced so far."""

    def __init__(self, request: GenerateRequest, sender: Any):
        self.request = request
        self.sender = sender
        self.cancelled = False
        self.cum_log_prob = 0.0
        self._held = Chunk(id=request.id, log_probs=[])
        self._prompt = request.input_ids or []

    def take(self, chunk: Chunk) -> Chunk | None:
        """The chunk to send now: each one when streaming, else all in one at the end (None before)."""
        self.cum_log_prob += sum(chunk.log_probs or ())
        if self.request.stream:
            return chunk
        self._held.text += chunk.text
        self._held.token_ids += chunk.token_ids
        self._held.log_probs = [*(self._held.log_probs or ()), *(chunk.log_probs or ())]
        return self._held if chunk.done else None

    def take_prompt(self) -> list[int]:
        """The prompt's token ids, once, if the answer is to start with them."""
        prompt = [] if self.request.exclude_input_in_output else self._prompt
        self._prompt = []
        return prompt


class GenerationModel:
    """Base of the Triton models; a model says which fields it takes and how a chunk becomes tensors."""

    contract: Contract
    publishes_worker_metrics = False

    def initialize(self, args: dict[str, str]) -> None:
        """Connect to the worker at $REDRAFT_WORKER_SOCKET; it need not be there yet."""
        _end_with_supervisor(Path(os.environ["REDRAFT_WORKER_SOCKET"]).with_name(protocol.SUPERVISOR_PIPE))
        config = json.loads(args["model_config"])
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        excluded = config["parameters"]["exclude_input_in_output"]["string_value"]
        self._exclude_input = excluded.lower() == "true"
        self._client = WorkerClient(os.environ["REDRAFT_WORKER_SOCKET"])
        self._client.wait_connected(timeout=2.0)
        self._latency = LatencyMetrics(args["model_name"])
        self._in_flight: dict[str, Exchange] = {}
        self._poll_from = 0
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._respond, name="redraft-responses")]
        if self.publishes_worker_metrics:
            self._threads.append(threading.Thread(target=self._publish_metrics, name="redraft-metrics"))
        for thread in self._threads:
            thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Submit Triton's requests; the responses follow from the response thread."""
        for request in requests:
            self._start(request)

    def finalize(self) -> None:
        """Fail what is still in flight and disconnect."""
        self._client.close()
        self._closing.set()
        self._wake()
        for thread in self._threads:
            thread.join()

    def tensors(self, exchange: Exchange, chunk: Chunk) -> list[Any]:
        """Output tensors, batch dimension first, for a chunk."""
        raise NotImplementedError

    def log_prob_tensors(self, exchange: Exchange, chunk: Chunk) -> list[Any]:
        """`cum_log_probs` f32[1, 1] (up to now) and `output_log_probs` f32[1, 1, n] (of this chunk), if asked for."""
        if not exchange.request.return_log_probs:
            return []
        return [
            pb_utils.Tensor("cum_log_probs", np.array([[exchange.cum_log_prob]], dtype=np.float32)),
            pb_utils.Tensor("output_log_probs", np.array([[chunk.log_probs or []]], dtype=np.float32)),
        ]

    def _start(self, request: Any) -> None:
        sender = request.get_response_sender()
        request_id = self._client.new_id()
        try:
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            tensors.setdefault("exclude_input_in_output", np.array([[self._exclude_input]]))
            client_id, parameters = _id_and_parameters(request)
            parsed = self.contract.parse(request_id, tensors, parameters, self._client.prompt_limits)
            if parsed.stream and not self._decoupled:
                raise InvalidRequest("stream: expected false, since this server runs without --decoupled, got true")
            self._in_flight[request_id] = Exchange(parsed, sender)
            if len(self._in_flight) == 1:
                self._wake()
            if client_id == protocol.PROBE:
                self._messages.put(Chunk(id=request_id, done=True))
            else:
                self._client.submit(parsed, self._messages.put)
        except InvalidRequest as error:
            _send_error(sender, protocol.INVALID, str(error))
        except WorkerError as error:
            self._in_flight.pop(request_id, None)
            _send_error(sender, error.code, str(error))
        except Exception:
            self._give_up(request_id, sender)

    def _give_up(self, request_id: str, sender: Any) -> None:
        """End one request after an exception, which the log gets; the others go on."""
        pb_utils.Logger.log_error(f"request {request_id} failed: {traceback.format_exc()}")
        self._in_flight.pop(request_id, None)
        self._client.cancel(request_id)
        with contextlib.suppress(Exception):
            _send_error(sender, protocol.INTERNAL, _INTERNAL_ERROR)

    def _wake(self) -> None:
        """Let the response thread look at what has changed: it sleeps while nothing is in flight."""
        self._messages.put(None)

    def _respond(self) -> None:
        next_poll = 0.0
        while not (self._closing.is_set() and self._messages.empty()):
            with contextlib.suppress(queue.Empty):
                message = self._messages.get(timeout=CANCELLATION_POLL_S if self._in_flight else None)
                if message is not None:
                    self._deliver(message)
            if (now := time.monotonic()) >= next_poll:
                next_poll = now + CANCELLATION_POLL_S
                self._pass_on_cancellations()

    def _deliver(self, message: Message) -> None:
        exchange = self._in_flight.get(message.id)
        if exchange is None:
            return
        ended = isinstance(message, ErrorMessage) or message.done
        if ended:
            self._in_flight.pop(message.id, None)  # another thread may have given it up meanwhile
        try:
            if isinstance(message, ErrorMessage):
                _send_error(exchange.sender, message.code, self.contract.in_client_terms(message.message))
            elif message.finish_reason == "cancelled":
                _send_error(exchange.sender, protocol.CANCELLED, "the request was cancelled")
            elif chunk := exchange.take(message):
                response = pb_utils.InferenceResponse(self.tensors(exchange, chunk))
                exchange.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if ended else 0)
                if message.stats:
                    self._latency.observe(message.stats)
        except Exception:
            self._give_up(message.id, exchange.sender)

    def _pass_on_cancellations(self) -> None:
        """Ask Triton about some of the requests in flight, in turn: each question waits for its answer."""
        exchanges = list(self._in_flight.items())
        if self._poll_from >= len(exchanges):
            self._poll_from = 0
        some = exchanges[self._poll_from : self._poll_from + CANCELLATIONS_PER_POLL]
        self._poll_from += len(some)
        for request_id, exchange in some:
            try:
                if not exchange.cancelled and exchange.sender.is_cancelled():
                    exchange.cancelled = True
                    self._client.cancel(request_id)
            except Exception:
                self._give_up(request_id, exchange.sender)

    def _publish_metrics(self) -> None:
        metrics = WorkerMetrics()
        restarts = RestartMetrics(Path(os.environ["REDRAFT_WORKER_SOCKET"]).with_name("state.json"))
        closing = False
        while not closing:
            status: WorkerStatus | None = None
            with contextlib.suppress(WorkerError):
                status = self._client.status(timeout=STATUS_POLL_S * 10)
            metrics.update(status)
            restarts.update()
            closing = self._closing.wait(STATUS_POLL_S)


def _id_and_parameters(request: Any) -> tuple[str, str]:
    """A request's id, and Triton's JSON of its parameters. Raises InvalidRequest where one is not UTF-8."""
    try:
        return request.request_id(), request.parameters()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"id and unknown fields: expected UTF-8 text, got {error.reason}") from None


def _end_with_supervisor(pipe: Path) -> None:
    """Have the kernel kill this process when the supervisor, which holds the pipe's other end, has gone. A thread could
    not: a call of Triton's metrics waits for the dead server with the interpreter locked. Parents do not count either:
    the server's thread that started this process may end before it."""
    if pipe.exists():
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)


def _send_error(sender: Any, code: str, text: str) -> None:
    error = pb_utils.TritonError(text, getattr(pb_utils.TritonError, _ERROR_CODES.get(code, "INTERNAL")))
    sender.send(pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
