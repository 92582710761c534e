"""Answer prompts of the domains, and store the answers as a service with --learn does.

    python -m studies.learning.served --bundle BUNDLE --learn FOLDER

Prompts whose answers are stored already are left out: a killed run goes on. A prompt of each domain follows on one of
the other.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated, cast

import typer
from safetensors import safe_open

from benchmarks.command import BundleFolder, MaxTokens, Threads, run
from redraft.chat import Writing, render_chat
from redraft.console.progress import progress
from redraft.learning.policy import Policy
from redraft.learning.shard_file import PROMPTS, SHARDS, prompt_hash
from redraft.request import GenerateRequest, SequenceStats
from redraft.runtime import Runtime
from studies.learning.domains import DOMAINS

TAUGHT, HELD_OUT = 0, 1
"""Seeds of the prompts that are served to be learned from, and of those that only judge: none is in both."""


def prompts_of(runtime: Runtime, name: str, count: int, seed: int) -> list[list[int]]:
    """Token ids of so many prompts of a domain."""
    assert runtime.path is not None
    texts = [render_chat(runtime.path, prompt, Writing({})) for prompt in DOMAINS[name].prompts(count, seed)]
    return [runtime.codec.encode(text, add_special_tokens=False) for text in texts]


def answer(
    runtime: Runtime,
    prompts: list[list[int]],
    max_tokens: int,
    method: str | None = None,
    streams: int | None = None,
) -> list[tuple[list[int], SequenceStats]]:
    """Answer the prompts greedily, so many side by side, by default as many as there are slots. Returns each answer's
    tokens and statistics, in the prompts' order."""
    scheduler, sent = runtime.scheduler, 0
    tokens: list[list[int]] = [[] for _ in prompts]
    stats: dict[int, SequenceStats] = {}
    with progress("answer", len(prompts), "prompts") as bar:
        while sent < len(prompts) or not scheduler.idle:
            status = scheduler.status()
            for _ in range(
                min((streams or runtime.limits.slots) - status.running - status.waiting, len(prompts) - sent)
            ):
                request = GenerateRequest(id=str(sent), input_ids=prompts[sent], max_tokens=max_tokens, method=method)
                scheduler.submit(runtime.sequence(sent, request))
                sent += 1
            for output in scheduler.step():
                index = cast(int, output.key)
                tokens[index] += output.token_ids
                if output.stats:
                    stats[index] = output.stats
            bar.update(len(stats))
    return [(tokens[index], stats[index]) for index in range(len(prompts))]


def stored(folder: Path) -> set[int]:
    """The hashes of the prompts whose answers a folder holds."""
    hashes: set[int] = set()
    for path in folder.glob(SHARDS):
        with safe_open(path, framework="np") as shard:
            hashes |= set(shard.get_tensor(PROMPTS).tolist())
    return hashes


def main(
    bundle: BundleFolder,
    learn: Annotated[Path, typer.Option(metavar="FOLDER", help="Where answers are stored.")],
    count: Annotated[int, typer.Option(min=1, help="Prompts of each domain.")] = 400,
    max_tokens: MaxTokens = 80,
    threads: Threads = None,
) -> None:
    """Answer prompts of the domains, and store the answers."""
    runtime = Runtime.load(bundle, threads)
    prompts = chain.from_iterable(zip(*(prompts_of(runtime, name, count, TAUGHT) for name in DOMAINS), strict=True))
    there = stored(learn)
    runtime.store_answers(Policy(learn))
    answer(runtime, [prompt for prompt in prompts if prompt_hash(prompt) not in there], max_tokens)
    runtime.end_storing()
    runtime.engine.close()


if __name__ == "__main__":
    run(main)
