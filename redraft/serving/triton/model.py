"""What the models that generate do: check a request, hand it to the worker, stream the answer back.

Imported inside Triton's Python backend only. Requests run side by side: `execute` returns at once, and one thread sends
every response and passes cancellations on.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
import traceback
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from redraft.errors import Code, RequestError
from redraft.request import GenerateRequest, InvalidRequest, SequenceStats, joined
from redraft.serving.triton.backend import end_with_supervisor, error_response, inputs
from redraft.serving.triton.fields import NUM_TOKENS, PERF_METRICS, STOP, Contract
from redraft.serving.triton.messages import INTERNAL_ERROR, TIMED_OUT
from redraft.worker import protocol
from redraft.worker.client import WorkerClient, WorkerMessage
from redraft.worker.protocol import Chunk, ErrorMessage

CANCELLATION_POLL_S = 0.02
CANCELLATIONS_PER_POLL = 8


class Exchange:
    """One request in flight: where its responses go, and what has been produced so far.

    `client_id` is the client's own id, `fields` are the names that it used, `flags` those of the contract's flags that
    it set.
    """

    def __init__(
        self,
        request: GenerateRequest,
        sender: Any,
        client_id: str,
        fields: Collection[str],
        flags: Collection[str],
    ):
        self.request = request
        self.sender = sender
        self.client_id = client_id
        self.fields = fields
        self.flags = flags
        self.cancelled = False
        self.stopped = False
        """Whether another request stopped it: it ends with the answer so far."""
        self.cum_log_prob = 0.0
        self.arrived_ns = time.monotonic_ns()
        self._parts: list[Chunk] = []
        self._prompt = request.input_ids or []

    def take(self, chunk: Chunk) -> Chunk | None:
        """The chunk to send now: each one when streaming, else all in one at the end (None before)."""
        self.cum_log_prob += sum(chunk.log_probs or ())
        if self.request.stream:
            return chunk
        self._parts.append(chunk)
        return replace(chunk, **joined(self._parts)) if chunk.done else None

    def take_prompt(self) -> list[int]:
        """The prompt's token ids, once, if the answer is to start with them."""
        prompt = [] if self.request.exclude_input_in_output else self._prompt
        self._prompt = []
        return prompt


class GenerationModel:
    """Base of the Triton models; a model says which fields it takes and how a chunk becomes tensors."""

    contract: Contract

    def initialize(self, args: dict[str, str]) -> None:
        """Connect to the worker at $REDRAFT_WORKER_SOCKET; it need not be there yet."""
        end_with_supervisor()
        config = json.loads(args["model_config"])
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        excluded = config["parameters"]["exclude_input_in_output"]["string_value"]
        self._exclude_input = excluded.lower() == "true"
        self._client = WorkerClient(os.environ["REDRAFT_WORKER_SOCKET"])
        self._client.wait_connected(timeout=2.0)
        self._in_flight: dict[str, Exchange] = {}
        self._poll_from = 0
        self._messages: queue.SimpleQueue[WorkerMessage | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._respond, name="redraft-responses")
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Submit Triton's requests; the responses follow from the response thread."""
        for request in requests:
            self._start(request)

    def finalize(self) -> None:
        """Fail what is still in flight and disconnect."""
        self._client.close()
        self._closing.set()
        self._wake()
        self._thread.join()

    def tensors(self, exchange: Exchange, chunk: Chunk) -> list[Any]:
        """Output tensors, batch dimension first, for a chunk."""
        raise NotImplementedError

    def shared_tensors(self, exchange: Exchange, chunk: Chunk) -> list[Any]:
        """The outputs that all models have, [1, 1] each: `batch_index`, `sequence_index`, and what was asked for.

        Of log-probabilities `cum_log_probs` f32 (up to now) and `output_log_probs` f32[1, 1, n] (of this chunk).
        """
        values: dict[str, Any] = {"batch_index": np.int32(0), "sequence_index": np.int32(0)}
        if exchange.request.return_log_probs:
            values["cum_log_probs"] = np.float32(exchange.cum_log_prob)
            values["output_log_probs"] = np.array(chunk.log_probs or [], np.float32)
        counts = {"num_input_tokens": chunk.prompt_tokens, "num_output_tokens": len(chunk.token_ids)}
        for flag, (name, count) in zip(NUM_TOKENS, counts.items(), strict=True):
            if flag in exchange.flags:
                values[name] = np.int32(count)
        if PERF_METRICS in exchange.flags:
            values |= _perf_metrics(exchange.arrived_ns, chunk.stats or SequenceStats())
        return [pb_utils.Tensor(name, value.reshape(1, 1, *value.shape)) for name, value in values.items()]

    def _start(self, request: Any) -> None:
        sender = request.get_response_sender()
        request_id = self._client.new_id()
        try:
            tensors = inputs(request)
            tensors.setdefault("exclude_input_in_output", np.array([[self._exclude_input]]))
            client_id, parameters = _id_and_parameters(request)
            flags = self.contract.flagged(tensors)
            if STOP in flags:
                self._stop(client_id, sender)
                return
            limits, timeout_us = self._client.prompt_limits, request.timeout()
            parsed = self.contract.parse(request_id, tensors, parameters, limits, timeout_us)
            if parsed.stream and not self._decoupled:
                raise InvalidRequest("stream: expected false, since this server runs without --decoupled, got true")
            self._in_flight[request_id] = Exchange(parsed, sender, client_id, tensors.keys(), flags)
            if len(self._in_flight) == 1:
                self._wake()
            if client_id == protocol.PROBE:
                self._messages.put(Chunk(id=request_id, done=True))
            else:
                self._client.submit(parsed, self._messages.put)
        except RequestError as error:
            self._in_flight.pop(request_id, None)
            _send_last(sender, error_response(error.code, error.message))
        except Exception:
            self._give_up(request_id, sender)

    def _stop(self, client_id: str, sender: Any) -> None:
        """Stop the requests with a client's id; there is none where it has just ended."""
        if not client_id:
            raise InvalidRequest("stop: expected the id of the request to stop as this request's id, got none")
        for request_id, exchange in list(self._in_flight.items()):
            if exchange.client_id == client_id:
                exchange.stopped = True
                self._client.cancel(request_id)
        _send_last(sender, pb_utils.InferenceResponse([]))

    def _give_up(self, request_id: str, sender: Any) -> None:
        """End one request after an exception, which the log gets; the others go on."""
        pb_utils.Logger.log_error(f"request {request_id} failed: {traceback.format_exc()}")
        self._in_flight.pop(request_id, None)
        self._client.cancel(request_id)
        with contextlib.suppress(Exception):
            _send_last(sender, error_response(Code.INTERNAL, INTERNAL_ERROR))

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

    def _deliver(self, message: WorkerMessage) -> None:
        exchange = self._in_flight.get(message.id)
        if exchange is None:
            return
        ended = isinstance(message, ErrorMessage) or message.done
        if ended:
            self._in_flight.pop(message.id, None)  # another thread may have given it up meanwhile
        try:
            if isinstance(message, ErrorMessage):
                text = self.contract.in_client_terms(message.message, exchange.fields)
                _send_last(exchange.sender, error_response(message.code, text))
            elif message.finish_reason == "timeout":
                text = f"{TIMED_OUT}: it did not end within {exchange.request.timeout_s} s"
                _send_last(exchange.sender, error_response(Code.DEADLINE, text))
            elif message.finish_reason == "cancelled" and not exchange.stopped:
                _send_last(exchange.sender, error_response(Code.CANCELLED, "the request was cancelled"))
            elif chunk := exchange.take(message):
                response = pb_utils.InferenceResponse(self.tensors(exchange, chunk))
                exchange.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if ended else 0)
        except Exception:
            self._give_up(message.id, exchange.sender)

    def _pass_on_cancellations(self) -> None:
        """Ask Triton about some of the requests in flight, in turn: each question waits for its answer."""
        exchanges = list(self._in_flight.items())
        if self._poll_from >= len(exchanges):
            self._poll_from = 0
        polled = exchanges[self._poll_from : self._poll_from + CANCELLATIONS_PER_POLL]
        self._poll_from += len(polled)
        for request_id, exchange in polled:
            try:
                if not exchange.cancelled and exchange.sender.is_cancelled():
                    exchange.cancelled = True
                    self._client.cancel(request_id)
            except Exception:
                self._give_up(request_id, exchange.sender)


def _id_and_parameters(request: Any) -> tuple[str, str]:
    """A request's id, and Triton's JSON of its parameters. Raises InvalidRequest where one is not UTF-8."""
    try:
        return request.request_id(), request.parameters()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"id and unknown fields: expected UTF-8 text, got {error.reason}") from None


def _send_last(sender: Any, response: Any) -> None:
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _perf_metrics(arrived_ns: int, stats: SequenceStats) -> dict[str, Any]:
    """TensorRT-LLM's metrics of a request: a block of the cache is a prompt token's row here, times are of the
    monotonic clock."""
    scheduled_ns = arrived_ns + int(1e6 * stats.queue_ms)
    first_token_ns = scheduled_ns + int(1e6 * stats.prefill_ms)
    return {
        "kv_cache_alloc_new_blocks": np.int32(stats.prompt_tokens - stats.cached_tokens),
        "kv_cache_reused_blocks": np.int32(stats.cached_tokens),
        "kv_cache_alloc_total_blocks": np.int32(stats.prompt_tokens),
        "arrival_time_ns": np.int64(arrived_ns),
        "first_scheduled_time_ns": np.int64(scheduled_ns),
        "first_token_time_ns": np.int64(first_token_ns),
        "last_token_time_ns": np.int64(first_token_ns + int(1e6 * stats.decode_ms)),
        "acceptance_rate": np.float32(stats.accepted / stats.drafted if stats.drafted else 0),
        "total_accepted_draft_tokens": np.int32(stats.accepted),
        "total_draft_tokens": np.int32(stats.drafted),
    }
