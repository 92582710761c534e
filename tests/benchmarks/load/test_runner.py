"""The open loop: requests leave at their times whatever the server does."""

import asyncio

from benchmarks.load.client import Generation
from benchmarks.load.metrics import Timeline
from benchmarks.load.runner import open_loop
from benchmarks.load.workload import ChatTokenizer


def requests(count):
    return [(Generation("hi", 8), Timeline(str(i), "c")) for i in range(count)]


def run(backend, times, folder, **options):
    return asyncio.run(open_loop(backend, requests(len(times)), times, ChatTokenizer(folder), **options))


def test_requests_leave_at_their_times_while_others_run(fake_backend, tokenizer_folder):
    backend = fake_backend(delay=0.5)
    for timeline in run(backend, [0, 0.02, 0.04, 0.06], tokenizer_folder):
        assert timeline.scheduled <= timeline.sent < timeline.scheduled + 0.5
    assert backend.most_in_flight == 4


def test_timelines_hold_chunks_and_tokens(fake_backend, tokenizer_folder):
    (timeline,) = run(fake_backend(chunks=3, words=2), [0], tokenizer_folder)
    assert len(timeline.chunk_times) == 3
    assert timeline.output_tokens == 6
    assert timeline.sent < timeline.chunk_times[0] < timeline.finished
    assert timeline.error is None


def test_concurrency_limit(fake_backend, tokenizer_folder):
    backend = fake_backend()
    ended = run(backend, [0] * 9, tokenizer_folder, max_concurrency=2)
    assert len(ended) == 9
    assert backend.most_in_flight == 2


def test_refused_requests_are_recorded(fake_backend, tokenizer_folder):
    ended = run(fake_backend(fail_every=3), [0] * 9, tokenizer_folder)
    assert sum(timeline.error is not None for timeline in ended) == 3


def test_cancelling_keeps_what_had_ended(fake_backend, tokenizer_folder):
    backend = fake_backend()

    async def cancelled():
        task = asyncio.create_task(open_loop(backend, requests(3), [0, 0, 60], ChatTokenizer(tokenizer_folder)))
        await asyncio.sleep(0.2)
        task.cancel()
        return await task

    assert len(asyncio.run(cancelled())) == 2
    assert backend.in_flight == 0
