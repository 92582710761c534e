"""Writing of teacher data: the documents of a stream, sorted into the shards of their parts."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from redraft.console.progress import Progress, duration, size
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target
from redraft.training.conversations import (
    MAX_USER_TOKENS,
    OPENING_TOKENS,
    PROMPT_TEMPERATURE,
    Generator,
    Template,
    documents,
    prefill,
)
from redraft.training.parts import Part
from redraft.training.ranks import this_rank
from redraft.training.shards import Document

SHARD_S = 60.0
"""Seconds after which a shard is closed, whatever it holds."""
OPERATIONS_PER_CORE = 1e11
"""Multiplications and additions a second, for the first estimate of the time; measured with 0.1B to 0.5B targets."""


def say(text: str) -> None:
    if this_rank().first:
        print(f"distill: {text}", file=sys.stderr, flush=True)


def say_origin(template: Template) -> None:
    """Say how the target writes all prompts itself."""
    what = f"user turns of up to {MAX_USER_TOKENS} tokens, from its chat template's user header"
    if not template.assistant:
        what = f"the first {OPENING_TOKENS} tokens of a text, as the model has no chat template"
    say(f"no prompts given: the target writes its own, each once ({what}, at temperature {PROMPT_TEMPERATURE:g})")


def say_plan(parts: Sequence[Part], token_bytes: int, weights: int, memory: int, engine: int) -> None:
    """What the run is to write, and about what it takes beside an engine of so many bytes that is yet to be built."""
    for part in parts:
        kind = "held out, to judge drafters by" if part.held_out else "to train on"
        count = part.distinct
        source = f"from {count:,} prompt{'s' * (count > 1)}" if count else "from the target's own prompts"
        held = min(part.shards.tokens, part.wanted)
        there = f", {held:,} of them there" if held else ""
        say(f"{part.shards.folder}: {part.wanted:,} tokens {kind}{there}; {source}")
    left = sum(max(part.wanted - part.shards.tokens, 0) for part in parts)
    cores = len(os.sched_getaffinity(0))
    seconds = 2 * weights * left / (OPERATIONS_PER_CORE * cores)
    disk = f"{size(left * token_bytes)} of disk" + (
        f" and {size(engine)} for the engine, whose build comes before and says what it takes" if engine else ""
    )
    say(f"about {disk}, at least {size(memory)} of memory and, on {cores} cores of a CPU, about {duration(seconds)}")


def cache_bytes(config: TargetConfig, slots: int, length: int) -> int:
    """Bytes of the keys and values of `slots` sequences, at 16 bits a number."""
    return 4 * slots * length * config.num_layers * config.num_kv_heads * config.head_size


def end_full_parts(generator: Generator, parts: Sequence[Part]) -> list[Document]:
    """End the documents of parts that hold, with them, what they are to. Returns those that go on."""
    for part in parts:
        if part.held_with(generator.of(part.held_out)) >= part.wanted:
            part.ended += generator.cut(part.held_out)
    return [doc for part in parts for doc in generator.of(part.held_out)]


def written(parts: Sequence[Part], under_way: Sequence[Document]) -> int:
    """Tokens towards what all parts are to hold."""
    return sum(min(part.held_with(under_way), part.wanted) for part in parts)


def write(
    shown: Progress,
    stream: Iterator[list[Document]],
    parts: Sequence[Part],
    shard_documents: int,
    generator: Generator | None = None,
) -> None:
    """Sort the documents of a stream into the shards of their parts. Where a generator writes them, those under way
    count, and end when their part holds what it is to."""
    shown.begin(written(parts, []))
    closed = time.monotonic()
    for ended in stream:
        for doc in ended:
            parts[doc.held_out].ended.append(doc)
        begun = end_full_parts(generator, parts) if generator else []
        shown.update(written(parts, begun), "")
        late = time.monotonic() - closed > SHARD_S
        for part in parts:
            if late or len(part.ended) >= shard_documents:
                part.close([doc for doc in begun if doc.held_out == part.held_out])
        closed = time.monotonic() if late else closed
    for part in parts:
        part.close([])


def generate(
    shown: Progress,
    generator: Generator,
    parts: Sequence[Part],
    own: Mapping[bool, Iterator[Document]],
    template: Template,
    max_new_tokens: int,
    shard_documents: int,
) -> None:
    """Have the target answer until all parts hold what they are to. The held-out part comes first."""
    usual = len(template) + MAX_USER_TOKENS // 2 + max_new_tokens

    def following() -> Document | None:
        for part in reversed(parts):
            planned = sum(max(len(doc.tokens), usual) for doc in generator.of(part.held_out))
            if part.held + planned < part.wanted:
                return next(own[part.held_out])
        return None

    stream = generator.run(following, max_new_tokens, template.assistant)
    write(shown, stream, parts, shard_documents, generator)
    if generator.dropped:
        say(f"dropped {generator.dropped:,} prompts of its own that the target had written before, or that are empty")


def read_responses(target: Target, parts: Sequence[Part], tokenizer, template: Template, batch: int, longest: int,
                   seed: int) -> Iterator[list[Document]]:  # fmt: skip
    """The documents of the prompts' own responses, until all parts hold what they are to."""
    for part in parts:
        stream = prefill(target, part.draw(seed, encoder(tokenizer)), tokenizer, template, batch, longest)
        while part.held < part.wanted:
            docs = next(stream)
            for doc in docs:
                doc.held_out = part.held_out
            yield docs


def own_documents(part: Part, tokenizer, template: Template, self_written: float, seed: int) -> Iterator[Document]:
    """What a part begins with: its own prompts and the target's."""
    drawn = part.draw(seed, encoder(tokenizer)) if part.prompts else None
    rng = random.Random(part.seed(seed))
    return documents(drawn, tokenizer, template, self_written, part.held_out, rng)


def encoder(tokenizer) -> Callable[[str], list[int]]:
    """What turns a user's text into the token ids that stand in its documents."""
    return partial(tokenizer.encode, add_special_tokens=False)
