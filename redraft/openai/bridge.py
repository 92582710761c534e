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
            for index, request in enumerate(self._requests):
                self._client.submit(request, partial(self._pass_on, index))
                self._running.add(index)
                self._metrics.running.inc()
        except WorkerError as error:
            self.__exit__()  # Python calls it only after an `__enter__` that succeeds: end those that were sent
            raise of_worker(error, self._fields) from None
        return self

    def __exit__(self, *_: object) -> None:
        for index in self._running:
            self._client.cancel(self._requests[index].id)
            self._metrics.running.dec()
        self._running.clear()

    async def chunks(self) -> AsyncIterator[tuple[int, Chunk]]:
        """Each chunk with its request's index, until all have ended. Raises ApiError where one fails."""
        while self._running:
            index, message = await self._messages.get()
            if isinstance(message, ErrorMessage):
                self._leave(index)
                raise of_worker(WorkerError(message.message, message.code), self._fields)
            if message.done:
                self._leave(index)
                if message.stats:
                    self._tracing.sequence(message.finish_reason or "stop", message.stats)
            yield index, message

    def _leave(self, index: int) -> None:
        self._running.discard(index)
        self._metrics.running.dec()

    def _pass_on(self, index: int, message: WorkerMessage) -> None:
        """Called on the client's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._messages.put_nowait, (index, message))
