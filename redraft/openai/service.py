"""What all endpoints share: the model, the worker, and how a body becomes running requests."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from redraft.errors import Code
from redraft.openai.access import log_failure
from redraft.openai.bridge import Generation
from redraft.openai.errors import ApiError, internal, invalid_body
from redraft.openai.metrics import FrontEndMetrics
from redraft.openai.model import ServedModel
from redraft.openai.schemas import Conversation, ModelBody
from redraft.openai.sse import ClientGone
from redraft.openai.tracing import Tracing
from redraft.openai.translate import Job
from redraft.serving.guard.limits import Room
from redraft.worker.client import WorkerClient, WorkerError
from redraft.worker.protocol import WorkerStatus

MAX_BODY_BYTES = 16 * 2**20
MAX_BODIES_BYTES = 4 * MAX_BODY_BYTES
"""All bodies together that arrive or are encoded; what is beyond is refused."""
INLINE_BYTES = 16_384
"""Larger bodies are read and encoded in threads of their own, so that streams and `/health` go on."""
READERS = 2
BODY_S = 30.0
"""A body that takes longer to arrive is given up."""
HEALTH_S = 2.0
JSON_TYPE = "application/json"

B = TypeVar("B", bound=ModelBody)
T = TypeVar("T")

log = logging.getLogger("redraft.openai")


class Service:
    """The served model and the connection to its worker."""

    def __init__(
        self, model: ServedModel, client: WorkerClient, metrics: FrontEndMetrics, silence_s: float, tracing: Tracing
    ):
        """A worker that has not answered for `silence_s` seconds is away."""
        self.model, self.client, self.metrics, self.tracing = model, client, metrics, tracing
        self._readers = ThreadPoolExecutor(READERS, "redraft-read")
        self._chats = ThreadPoolExecutor(READERS, "redraft-chat")
        self._room = Room(MAX_BODIES_BYTES, partial(ApiError, code=Code.OVERLOADED))
        self._silence_s = silence_s
        self.status: WorkerStatus | None = None
        """What the worker said last."""
        self.engine_metrics = ""
        """The page of the worker's metrics as it was last asked for."""
        self._answered = -silence_s
        self._questions: dict[bool, asyncio.Future[bool]] = {}
        self._reading: asyncio.Future[ServedModel] | None = None

    async def accept(self, request: Request, schema: type[B], translate: Callable[[B, ServedModel], T]) -> tuple[B, T]:
        """Read a request: its body, and what it asks of the worker. Raises ApiError."""
        with self._room.body() as take:
            data = await _read(request, take)
            model = await self.current_model()

            def work() -> tuple[B, T]:
                try:
                    body = schema.model_validate_json(data)
                except ValidationError as error:
                    raise invalid_body(error) from None
                model.check_name(body.model)
                return body, translate(body, model)

            small = len(data) <= INLINE_BYTES  # sooner read here than handed to a thread
            if small and not issubclass(schema, Conversation):
                return work()
            # A chat template may take seconds, in a process of its own.
            return await asyncio.get_running_loop().run_in_executor(self._chats if small else self._readers, work)

    async def current_model(self) -> ServedModel:
        """The model, read again where the service has swapped its bundle. Requests that come meanwhile wait for it."""
        if self.model.replaced:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.ensure_future(asyncio.to_thread(self.model.successor))
            try:
                self.model = await asyncio.shield(self._reading)
            except (OSError, ValueError, RuntimeError) as error:
                log.error("requests are checked against the bundle that was served before: %s", error)
            self.tracing.model = self.model.name
        return self.model

    async def worker_ready(self, metrics: bool = False) -> bool:
        """Ask whether the worker is there and ready, and for its metrics where these are wanted.

        While it is slow to answer, what it last said holds, until it has been silent for too long. Those who want to
        know at the same time share one question.
        """
        question = self._questions.get(metrics)
        if question is None or question.done():
            question = self._questions[metrics] = asyncio.ensure_future(asyncio.to_thread(self._ask_worker, metrics))
        return await asyncio.shield(question)

    def _ask_worker(self, metrics: bool) -> bool:
        try:
            self.status = self.client.status(HEALTH_S, metrics)
            self._answered = time.monotonic()
            if metrics:
                self.engine_metrics = self.status.metrics
        except WorkerError:
            if not self.client.connected or time.monotonic() - self._answered > self._silence_s:
                return False
        return self.status is not None and self.status.ready

    def generation(self, request: Request, job: Job) -> Generation:
        """The job's requests, to be run within the context, for the client that `Access` names. Raises ApiError for
        more than the worker ever takes."""
        wanted = len(job.requests)
        if self.status and (limits := self.status.limits):
            most, why = min(
                (limits["slots"] + limits["max_queue"], "as many run and wait"),
                (limits.get("max_per_client", wanted), "as --max-per-client allows"),
            )
            if wanted > most:
                raise ApiError(f"n: expected at most {most} choices in all, {why}, got {wanted}", "n")
        named = {"client": request.state.client, "scope": request.state.scope}
        requests = [
            worker_request.model_copy(update=named | {"id": self.client.new_id()}) for worker_request in job.requests
        ]
        return Generation(self.client, requests, job.fields, self.metrics, self.tracing)


def new_id(kind: str) -> str:
    """The id of an answer, such as `chatcmpl-...`."""
    return f"{kind}-{uuid.uuid4().hex}"


async def ending_with_errors(
    first: bytes, events: AsyncIterator[bytes], write_error: Callable[[ApiError], bytes]
) -> AsyncIterator[bytes]:
    """A stream after its first event, which says so where it fails: its status is sent already."""
    try:
        yield first
        async for data in events:
            yield data
    except ApiError as error:
        yield write_error(error)
    except Exception as error:
        log_failure(error)
        yield write_error(internal())


async def _read(request: Request, take: Callable[[int], None]) -> bytes:
    """A request's body; `take` is told how long each of its parts is."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise ApiError(f"Content-Type: expected {JSON_TYPE}, got {kind[:60]!r}", code=Code.UNSUPPORTED_MEDIA_TYPE)
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise ApiError(f"Content-Encoding: expected identity, got {coding[:60]!r}", code=Code.UNSUPPORTED_MEDIA_TYPE)
    most = f"the body is too large: expected at most {MAX_BODY_BYTES} bytes"
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise ApiError(most, code=Code.TOO_LARGE)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                take(len(part))
                parts.append(part)
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise ApiError(most, code=Code.TOO_LARGE)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {BODY_S:.0f} s", code=Code.BODY_TIMEOUT) from None
    if not size:
        raise ApiError("the body is empty: expected a JSON object")
    return b"".join(parts)
