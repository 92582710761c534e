"""The worker's messages on an asyncio loop: one generation per HTTP request, of one or more sequences."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Self

from redraft.openai.errors import of_worker
from redraft.openai.metrics import FrontEndMetrics
from redraft.openai.tracing import Tracing
from redraft.request import GenerateRequest
from redraft.worker.client import WorkerClient, WorkerError, WorkerMessage
from redraft.worker.protocol import Chunk, ErrorMessage


class Generation:
    """Requests that run side by side and end together: leaving the context cancels those that have not ended."""

    def __init__(
        self,
        client: WorkerClient,
        requests: Sequence[GenerateRequest],
        fields: Mapping[str, str],
        metrics: FrontEndMetrics,
        tracing: Tracing,
    ):
        """`fields` are the client's names of the worker's, for what the worker refuses."""
        self._client, self._requests, self._fields = client, requests, fields
        self._metrics, self._tracing = metrics, tracing
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[tuple[int, WorkerMessage]] = asyncio.Queue()
        self._running: set[int] = set()

    def __enter__(self) -> Self:
        """Submit the requests. Raises ApiError where one cannot be sent."""
        try:
            for place, request in enumerate(self._requests):
                self._client.submit(request, partial(self._pass_on, place))
                self._running.add(place)
                self._metrics.running.inc()
        except WorkerError as error:
            self.__exit__()
            raise of_worker(error, self._fields) from None
        return self

    def __exit__(self, *_: object) -> None:
        for place in self._running:
            self._client.cancel(self._requests[place].id)
            self._metrics.running.dec()
        self._running.clear()

    async def chunks(self) -> AsyncIterator[tuple[int, Chunk]]:
        """Each chunk with its request's place, until all have ended. Raises ApiError where one fails."""
        while self._running:
            place, message = await self._messages.get()
            if isinstance(message, ErrorMessage):
                self._leave(place)
                raise of_worker(WorkerError(message.message, message.code), self._fields)
            if message.done:
                self._leave(place)
                if message.stats:
                    self._tracing.sequence(message.finish_reason or "stop", message.stats)
            yield place, message

    def _leave(self, place: int) -> None:
        self._running.discard(place)
        self._metrics.running.dec()

    def _pass_on(self, place: int, message: WorkerMessage) -> None:
        """Called on the client's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._messages.put_nowait, (place, message))
