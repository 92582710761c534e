"""Sends requests at their times, without waiting for earlier answers, and records each one's timeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from benchmarks.load.client import Backend, Generation, GenerationError
from benchmarks.load.metrics import Timeline
from benchmarks.load.workload import ChatTokenizer


async def run_one(backend: Backend, generation: Generation, timeline: Timeline, tokenizer: ChatTokenizer) -> Timeline:
    """Stream one generation into its timeline. A refusal or a broken stream becomes the timeline's error.

    Output tokens are the server's token ids where it sends them, else the tokenizer's count of the whole text.
    """
    token_ids: list[int] = []
    pieces: list[str] = []
    timeline.sent = time.perf_counter()
    try:
        async for piece in backend.stream(generation):
            if piece.text or piece.token_ids:
                timeline.chunk_times.append(time.perf_counter())
            pieces.append(piece.text)
            token_ids += piece.token_ids
            timeline.statistics.update(piece.statistics)
    except GenerationError as error:
        timeline.error = str(error)
    timeline.finished = time.perf_counter()
    timeline.text = "".join(pieces)
    timeline.output_tokens = len(token_ids) or len(tokenizer.encode(timeline.text))
    return timeline


async def open_loop(
    backend: Backend,
    requests: Sequence[tuple[Generation, Timeline]],
    times: Sequence[float],
    tokenizer: ChatTokenizer,
    max_concurrency: int | None = None,
    on_done: Callable[[Timeline], None] = lambda timeline: None,
) -> list[Timeline]:
    """Send request i at times[i] seconds from now; timelines of those that ended, in order of completion.

    With `max_concurrency`, a request that is due waits until fewer are in flight; its clock starts when it is sent.
    A cancellation (Ctrl-C) stops what is in flight and returns what had ended: fewer timelines than requests.
    """
    gate = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    start = time.perf_counter()
    ended: list[Timeline] = []

    async def one(generation: Generation, timeline: Timeline, due: float) -> None:
        await asyncio.sleep(start + due - time.perf_counter())
        timeline.scheduled = start + due
        async with gate:
            ended.append(await run_one(backend, generation, timeline, tokenizer))
        on_done(timeline)

    tasks = [asyncio.create_task(one(*request, due)) for request, due in zip(requests, times, strict=True)]
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return ended
