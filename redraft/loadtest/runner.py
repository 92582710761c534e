"""Sends requests at their times, without waiting for earlier answers, and records each one's timeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from redraft.chat import ChatMessage
from redraft.loadtest.clients.base import Client, Generation, GenerationError
from redraft.loadtest.metrics import Timeline
from redraft.loadtest.workload import ChatTokenizer, Conversation

Write = Callable[[Conversation, Sequence[ChatMessage]], Generation]
"""Writes the request for a conversation's next turn, given its messages so far."""


async def run_one(
    client: Client, generation: Generation, timeline: Timeline, tokenizer: ChatTokenizer, due: float | None = None
) -> Timeline:
    """Stream one generation into its timeline. A refusal or a broken stream becomes the timeline's error.

    It was due at `due`, by default now. Output tokens are the server's token ids or its count where it sends them, else
    the tokenizer's count of the whole text.
    """
    token_ids: list[int] = []
    pieces: list[str] = []
    counted: int | None = None
    timeline.sent = time.perf_counter()
    timeline.due = timeline.sent if due is None else due
    try:
        async for piece in client.stream(generation):
            if piece.text or piece.token_ids:
                timeline.chunk_times.append(time.perf_counter())
            pieces.append(piece.text)
            token_ids += piece.token_ids
            counted = counted if piece.output_tokens is None else piece.output_tokens
            timeline.statistics.update(piece.statistics)
    except GenerationError as error:
        timeline.error = str(error)
    timeline.finished = time.perf_counter()
    timeline.text = "".join(pieces)
    # In a thread, so that other answers' times are not held up.
    prompt, answer = await asyncio.to_thread(lambda: [tokenizer.encode(t) for t in (generation.text, timeline.text)])
    timeline.prompt_tokens, timeline.output_tokens = len(prompt), len(token_ids) or counted or len(answer)
    return timeline


async def hold(
    client: Client,
    conversation: Conversation,
    due: float,
    write: Write,
    tokenizer: ChatTokenizer,
    on_done: Callable[[Timeline], None],
) -> None:
    """Send a conversation's turns in order. A turn is due when the answer before it has ended, and its prompt has the
    answers so far. An error ends the conversation."""
    messages: list[ChatMessage] = list(conversation.opening)
    for turn, text in enumerate(conversation.turns):
        messages.append({"role": "user", "content": text})
        timeline = Timeline(conversation.question_id, conversation.category, turn=turn)
        await run_one(client, write(conversation, messages), timeline, tokenizer, due)
        on_done(timeline)
        if timeline.error is not None:
            return
        messages.append({"role": "assistant", "content": timeline.text})
        due = timeline.finished


async def open_loop(
    client: Client,
    conversations: Sequence[Conversation],
    times: Sequence[float] | None,
    write: Write,
    tokenizer: ChatTokenizer,
    max_concurrency: int | None = None,
    on_done: Callable[[Timeline], None] = lambda timeline: None,
) -> tuple[list[Timeline], bool]:
    """Begin conversation i at times[i] seconds from now. The timelines of the requests that ended, in order of
    completion, and whether all did.

    With `max_concurrency` a conversation waits until fewer are in flight; it was due at its time nevertheless. Without
    `times` it is due as soon as there is a place for it. A cancellation (Ctrl-C) stops what is in flight.
    """
    gate: AbstractAsyncContextManager = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    start = time.perf_counter()
    ended: list[Timeline] = []

    def done(timeline: Timeline) -> None:
        ended.append(timeline)
        on_done(timeline)

    async def one(conversation: Conversation, due: float | None) -> None:
        if due is not None:
            await asyncio.sleep(start + due - time.perf_counter())
        async with gate:
            moment = time.perf_counter() if due is None else start + due
            await hold(client, conversation, moment, write, tokenizer, done)

    starts: Sequence[float | None] = times if times is not None else [None] * len(conversations)
    tasks = [asyncio.create_task(one(*pair)) for pair in zip(conversations, starts, strict=True)]
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return ended, False
    return ended, True
