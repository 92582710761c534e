"""A stand-in server and a small tokenizer folder with a chat template."""

import asyncio

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from redraft.loadtest.clients.base import Generation, GenerationError, Piece


class FakeClient:
    """Streams `chunks` pieces of `words` words, `delay` s apart; every `fail_every`-th request is refused. With
    `capacity`, requests take turns, so many a second at most: after a stall of the machine it does not catch up."""

    def __init__(self, chunks=4, words=2, delay=0.001, fail_every=0, capacity=0):
        self.chunks, self.words, self.delay, self.fail_every = chunks, words, delay, fail_every
        self.capacity = capacity
        self.seen: list[Generation] = []
        self.in_flight = self.most_in_flight = 0
        self.closed = False

    async def stream(self, generation):
        self.seen.append(generation)
        if self.fail_every and len(self.seen) % self.fail_every == 0:
            raise GenerationError("overloaded: the queue is full")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.in_flight == 1:
            self.turn = asyncio.Lock()
        try:
            if self.capacity:
                async with self.turn:
                    await asyncio.sleep(1 / self.capacity)
            for _ in range(self.chunks):
                await asyncio.sleep(self.delay)
                yield Piece("word " * self.words)
            yield Piece("")
        finally:
            self.in_flight -= 1

    async def counters(self):
        steps = self.chunks * len(self.seen)
        return {
            "generation_tokens_total": self.words * steps,
            "engine_sequence_steps_total": steps,
            "spec_decode_num_draft_tokens_total": 4 * steps,
            "spec_decode_num_accepted_tokens_total": (self.words - 1) * steps,
        }

    async def close(self):
        self.closed = True


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(WordLevel({"word": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}assistant"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def fake_client():
    """The class of the stand-in server."""
    return FakeClient
