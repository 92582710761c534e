"""The engine worker itself, without a server in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict

from redraft.loadtest.clients.base import Generation, GenerationError, Piece
from redraft.metrics import read
from redraft.request import GenerateRequest, SamplingConfig
from redraft.worker.client import WorkerClient, WorkerError
from redraft.worker.protocol import Chunk, ErrorMessage


class BareWorker:
    """The engine worker at `socket_path`. Raises GenerationError where none answers within `timeout` seconds."""

    def __init__(self, socket_path: str, timeout: float = 30.0):
        self.client = WorkerClient(socket_path)
        if not self.client.wait_connected(timeout):
            raise GenerationError(f"no engine worker at {socket_path} within {timeout} s")

    async def stream(self, generation: Generation) -> AsyncIterator[Piece]:
        """Yield the worker's chunks, the last with the request's statistics. Raises GenerationError."""
        loop, messages = asyncio.get_running_loop(), asyncio.Queue[Chunk | ErrorMessage]()
        request = worker_request(generation, self.client.new_id())

        def deliver(message: Chunk | ErrorMessage) -> None:
            loop.call_soon_threadsafe(messages.put_nowait, message)

        try:
            self.client.submit(request, deliver)
        except WorkerError as error:
            raise GenerationError(f"{error.code}: {error}") from None
        ended = False
        try:
            while not ended:
                message = await messages.get()
                if isinstance(message, ErrorMessage):
                    ended = True
                    raise GenerationError(f"{message.code}: {message.message}")
                ended = message.done
                statistics = asdict(message.stats) if message.stats else {}
                yield Piece(message.text, message.token_ids, statistics)
        finally:
            if not ended:
                self.client.cancel(request.id)

    async def counters(self) -> dict[str, float]:
        """The worker's metrics."""
        return read((await asyncio.to_thread(self.client.status, metrics=True)).metrics)

    async def close(self) -> None:
        """Close the connection."""
        self.client.close()


def worker_request(generation: Generation, request_id: str) -> GenerateRequest:
    """The worker's form of a generation, streamed."""
    return GenerateRequest(
        id=request_id,
        text=generation.text,
        add_special_tokens=generation.add_special_tokens,
        max_tokens=generation.max_tokens,
        stream=True,
        sampling=SamplingConfig(**generation.sampling),
        bad_words=list(generation.bad_words),
        method=generation.method,
    )
