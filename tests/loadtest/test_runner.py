"""The open loop: requests leave at their times whatever the server does, and a conversation's turns in order."""

import asyncio
import threading

from redraft.loadtest.clients.base import Generation
from redraft.loadtest.runner import open_loop
from redraft.loadtest.workload import ChatTokenizer, Conversation


def run(client, times, folder, count=None, turns=("hi",), system=None, **options):
    conversations = [Conversation(str(i), "c", turns, i, system) for i in range(count or len(times))]
    tokenizer = ChatTokenizer(folder)

    def write(conversation, messages):
        return Generation(tokenizer.write(messages), 8, {"seed": conversation.seed}, messages=tuple(messages))

    return asyncio.run(open_loop(client, conversations, times, write, tokenizer, **options))[0]


def test_requests_leave_at_their_times_while_others_run(fake_client, tokenizer_folder):
    client = fake_client(delay=0.5)
    for timeline in run(client, [0, 0.02, 0.04, 0.06], tokenizer_folder):
        assert timeline.due <= timeline.sent
    assert client.most_in_flight == 4


def test_timelines_hold_chunks_and_tokens(fake_client, tokenizer_folder):
    (timeline,) = run(fake_client(chunks=3, words=2), [0], tokenizer_folder)
    assert len(timeline.chunk_times) == 3
    assert (timeline.prompt_tokens, timeline.output_tokens) == (3, 6)
    assert timeline.sent < timeline.chunk_times[0] < timeline.finished
    assert timeline.error is None


def test_a_request_that_waits_for_a_place_was_due_at_its_time(fake_client, tokenizer_folder):
    client = fake_client(chunks=1, delay=0.1)
    ended = run(client, [0] * 3, tokenizer_folder, max_concurrency=1)
    assert client.most_in_flight == 1
    assert len({timeline.due for timeline in ended}) == 1
    assert [timeline.ttft > 100 * place for place, timeline in enumerate(ended, 1)] == [True] * 3


def test_without_times_a_request_is_due_when_there_is_a_place(fake_client, tokenizer_folder):
    client = fake_client(chunks=1, delay=0.02)
    first, second, *_ = run(client, None, tokenizer_folder, count=4, max_concurrency=1)
    assert client.most_in_flight == 1
    assert second.due >= first.finished


def test_turns_come_in_order_with_the_answers_in_the_prompt(fake_client, tokenizer_folder):
    client = fake_client(chunks=1, words=1)
    first, second = run(client, [0], tokenizer_folder, turns=("hi", "and"), system="be brief")
    assert [m["content"] for m in client.seen[1].messages] == ["be brief", "hi", "word ", "and"]
    assert client.seen[1].text == "system be brief user hi assistant word  user and assistant"
    assert (first.turn, second.turn) == (0, 1)
    assert second.due == first.finished
    assert second.prompt_tokens > first.prompt_tokens


def test_an_error_ends_a_conversation(fake_client, tokenizer_folder):
    client = fake_client(fail_every=2)
    ended = run(client, [0], tokenizer_folder, turns=("one", "two", "three"))
    assert [timeline.error is None for timeline in ended] == [True, False]


def test_counting_tokens_holds_up_no_other_answer(fake_client, tokenizer_folder, monkeypatch):
    """The first answer's tokens are not counted until the second has ended."""
    client, encode = fake_client(), ChatTokenizer.encode
    stream, ended, both, waited = client.stream, [], threading.Event(), []

    async def counted(generation):
        async for piece in stream(generation):
            yield piece
        ended.append(generation)
        if len(ended) == 2:
            both.set()

    monkeypatch.setattr(client, "stream", counted)
    monkeypatch.setattr(ChatTokenizer, "encode", lambda *args: waited.append(both.wait(10)) or encode(*args))
    run(client, [0, 0], tokenizer_folder)
    assert waited == [True] * 4


def test_refused_requests_are_recorded(fake_client, tokenizer_folder):
    ended = run(fake_client(fail_every=3), [0] * 9, tokenizer_folder)
    assert sum(timeline.error is not None for timeline in ended) == 3


def test_cancelling_keeps_what_had_ended(fake_client, tokenizer_folder):
    client, tokenizer = fake_client(), ChatTokenizer(tokenizer_folder)

    async def cancelled():
        conversations = [Conversation(str(i), "c", ("hi",), i) for i in range(3)]
        answers = asyncio.Semaphore(0)
        loop = open_loop(
            client, conversations, [0, 0, 60], lambda *_: Generation("hi", 8), tokenizer,
            on_done=lambda _: answers.release(),
        )  # fmt: skip
        task = asyncio.create_task(loop)
        for _ in range(2):
            await answers.acquire()
        task.cancel()
        return await task

    ended, whole = asyncio.run(cancelled())
    assert (len(ended), whole) == (2, False)
    assert client.in_flight == 0
