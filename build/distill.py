#!/usr/bin/env python
"""Write teacher data: token sequences with the target's last hidden states.

Two sources, one format:

  generate   the target answers prompts (greedy or sampled); a share of the prompts it writes itself,
             sampled from an empty user turn
  prefill    the target reads the prompts' own responses; no generation, so several times faster

The output folder holds numbered safetensors shards: `tokens` int32 [N], `hidden` bfloat16 [N, H]
(hidden[t] is the state after the final norm whose logits predict tokens[t + 1]), `offsets` int64
[documents + 1] and `answer_starts` int64 [documents] (positions in N). A shard appears whole or not at
all; the command can be killed at any time and goes on where it stopped.

With --held-out it writes conversations to judge drafters by: one prompt in 64, by a hash of its text, is for these.
"""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from pydantic import BaseModel, ValidationError
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import AutoTokenizer

from forward import EngineForward, Forward, TorchForward
from model_defs.attention import causal_attend
from model_defs.files import save_tensors
from model_defs.target import Target
from model_defs.working_precision import working_dtype
from redraft.bundle import BundleError
from redraft.interrupt import interruptible

MAX_USER_TOKENS = 96
PROMPT_TEMPERATURE = 0.8
LOOP_TOKENS = 48
LOOP_PERIODS = 16
LOOP_CHECK = 8
RESERVED = 64
HELD_OUT_SEED = 1_000_000
"""Far from the seeds of training data, which are the numbers of its shards: a model writes other prompts itself."""
TEMPERATURES = ((0.0, 0.6), (0.7, 0.25), (1.0, 0.15))


class Source(StrEnum):
    generate = "generate"
    prefill = "prefill"


class Prompt(BaseModel):
    """A line of --prompts."""

    source: str
    prompt: str
    response: str | None = None


@dataclass
class Document:
    """One conversation: `pending` tokens are fed as they are, further ones are drawn."""

    pending: deque[int]
    temperature: float
    writes_prompt: bool = False
    tokens: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    answer_start: int = 0
    drawn: int = 0

    def loops(self) -> bool:
        """Whether the last LOOP_TOKENS tokens repeat with a short period (looked at every LOOP_CHECK tokens)."""
        if len(self.tokens) % LOOP_CHECK:
            return False
        tail = self.tokens[-LOOP_TOKENS:]
        return len(tail) == LOOP_TOKENS and any(tail[p:] == tail[:-p] for p in range(1, LOOP_PERIODS + 1))


def is_reserved(prompt: str) -> bool:
    """Whether a prompt is of those that only held-out conversations begin with: one in RESERVED, by its text."""
    return int.from_bytes(sha256(prompt.strip().encode()).digest()[:8], "big") % RESERVED == 0


def read_prompts(path: Path, shares: dict[str, float], seed: int, held_out: bool) -> Iterator[Prompt]:
    """Endless prompts, drawn by source with the given shares (a source not named has share 0): the reserved ones for
    held-out conversations, else the others.

    Raises typer.BadParameter for a line that is no such row and for a share without prompts, OSError for the file.
    """
    by_source: dict[str, list[Prompt]] = {}
    for number, line in enumerate(path.open(), 1):
        try:
            row = Prompt.model_validate_json(line)
        except ValidationError as error:
            raise typer.BadParameter(f"{path}, line {number}: {error}") from None
        if is_reserved(row.prompt) == held_out:
            by_source.setdefault(row.source, []).append(row)
    unknown = set(shares) - set(by_source)
    if unknown:
        which = f" with prompts for --held-out, which are 1 in {RESERVED}" if held_out else ""
        raise typer.BadParameter(f"{path} has no source {sorted(unknown)}{which}; it has {sorted(by_source)}")
    rng = random.Random(seed)
    cycles = {name: itertools.cycle(rng.sample(by_source[name], len(by_source[name]))) for name in shares}
    return (next(cycles[rng.choices(list(shares), list(shares.values()))[0]]) for _ in itertools.count())


def draw(logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Tokens int64 [B] from float logits [B, V], on their and the generator's device; temperatures [B], on the CPU: 0
    takes the largest."""
    greedy = logits.argmax(-1)
    rows = (temperatures > 0).nonzero().squeeze(-1)
    if len(rows):
        scale, rows = temperatures[rows, None].to(logits.device), rows.to(logits.device)
        cdf = torch.softmax(logits[rows].float() / scale, dim=-1).cumsum_(-1)
        uniform = torch.rand(len(rows), 1, generator=generator, device=logits.device) * cdf[:, -1:]
        greedy[rows] = torch.searchsorted(cdf, uniform).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    return greedy


def _draw_temperature(rng: random.Random) -> float:
    temperatures, shares = zip(*TEMPERATURES, strict=True)
    return rng.choices(temperatures, shares)[0]


class Generator:
    """Continuous batching over a preallocated cache: one token of every slot per forward.

    All documents share the rows of `prefix` (the chat template's opening but its last token), computed once.
    """

    def __init__(self, forward: Forward, ends: set[int], prefix: list[int], seed: int):
        self.forward, self.ends, self.prefix = forward, ends, prefix
        slots = forward.slots
        hidden, logits = forward([prefix or [0]] * slots, [0] * slots, [])
        self.prefix_hidden = hidden[0, : len(prefix)]
        self.random = torch.Generator(logits.device).manual_seed(seed)
        self.rng = random.Random(seed)

    def run(self, documents: Iterator[Document], max_new_tokens: int, assistant: list[int]) -> Iterator[Document]:
        """Yield documents as they end: at an end token, `max_new_tokens`, a loop, or a full cache."""
        running = [self._start(next(documents)) for _ in range(self.forward.slots)]
        while True:
            # The last token of a document is not in the cache yet.
            lengths = [len(doc.tokens) - 1 for doc in running]
            wanted = [slot for slot, doc in enumerate(running) if not doc.pending]
            hidden, logits = self.forward([doc.tokens[-1:] for doc in running], lengths, wanted)
            temperatures = torch.tensor([running[slot].temperature for slot in wanted])
            drawn = dict(zip(wanted, draw(logits, temperatures, self.random).tolist(), strict=True))
            for slot, doc in enumerate(running):
                doc.hidden.append(hidden[slot, 0])
                if doc.pending:
                    doc.tokens.append(doc.pending.popleft())
                    continue
                token = drawn[slot]
                doc.drawn += 1
                finished = token in self.ends
                if doc.writes_prompt and not (finished or doc.drawn >= MAX_USER_TOKENS or doc.loops()):
                    doc.tokens.append(token)
                    continue
                if doc.writes_prompt:
                    doc.writes_prompt, doc.drawn = False, 0
                    doc.temperature = _draw_temperature(self.rng)
                    doc.pending.extend(assistant[1:])
                    doc.tokens.append(assistant[0])
                    doc.answer_start = len(doc.tokens) - 1 + len(assistant)
                    continue
                doc.tokens.append(token)
                full = len(doc.tokens) >= self.forward.length
                if finished or full or doc.drawn >= max_new_tokens or doc.loops():
                    doc.hidden.append(hidden[slot, 0])
                    yield doc
                    running[slot] = self._start(next(documents))

    def _start(self, doc: Document) -> Document:
        doc.tokens = [*self.prefix, doc.pending.popleft()]
        doc.hidden = list(self.prefix_hidden)
        return doc


@dataclass(frozen=True)
class Template:
    """The pieces of a chat template around one user turn, as token ids."""

    prefix: list[int]
    assistant: list[int]

    @classmethod
    def of(cls, tokenizer) -> Template:
        mark = "\u241f"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
        before, after = text.split(mark)
        encode = lambda part: tokenizer.encode(part, add_special_tokens=False)  # noqa: E731
        found = cls(encode(before), encode(after))
        if not (found.prefix and found.assistant):
            raise typer.BadParameter(
                f"the chat template has {before!r} before the user's text and {after!r} behind it, "
                f"{len(found.prefix)} and {len(found.assistant)} tokens: expected one at least of each"
            )
        return found


def documents(
    prompts: Iterator[Prompt],
    tokenizer,
    template: Template,
    self_written: float,
    longest: int,
    rng: random.Random,
) -> Iterator[Document]:
    while True:
        if rng.random() < self_written:
            yield Document(deque(template.prefix[-1:]), PROMPT_TEMPERATURE, writes_prompt=True)
            continue
        user = tokenizer.encode(next(prompts).prompt, add_special_tokens=False)
        if len(user) > longest:
            continue
        pending = deque([template.prefix[-1], *user, *template.assistant])
        start = len(template.prefix) - 1 + len(pending)
        yield Document(pending, _draw_temperature(rng), answer_start=start)


def prefill(
    target: Target, prompts: Iterator[Prompt], tokenizer, template: Template, batch: int, longest: int
) -> Iterator[Document]:
    """Documents of the prompts' own responses, cut to `longest` tokens, hidden states by batched prefill."""
    while True:
        rows = [next(prompts) for _ in range(batch * 4)]
        docs = []
        for row in rows:
            if row.response is None:
                raise typer.BadParameter(f"--source prefill needs a `response`, the prompt {row.prompt!r} has none")
            user, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (row.prompt, row.response))
            head = [*template.prefix, *user, *template.assistant]
            tokens = [*head, *answer, target.config.eos_token_ids[0]][:longest]
            if len(tokens) > len(head) + 8:
                docs.append(Document(deque(), 0.0, tokens=tokens, answer_start=len(head)))
        docs.sort(key=lambda doc: len(doc.tokens))
        for group in (docs[i : i + batch] for i in range(0, len(docs), batch)):
            width = max(len(doc.tokens) for doc in group)
            ids = torch.tensor([doc.tokens + [0] * (width - len(doc.tokens)) for doc in group])
            device = target.embedding.weight.device
            hidden = target(ids.to(device), causal_attend(target.config, width, device)).to(torch.bfloat16).cpu()
            for row, doc in zip(hidden, group, strict=True):
                doc.hidden = list(row[: len(doc.tokens)])
                yield doc


def write_shard(path: Path, docs: list[Document], meta: dict[str, str]) -> int:
    offsets = torch.tensor([0, *itertools.accumulate(len(doc.tokens) for doc in docs)])
    tensors = {
        "tokens": torch.tensor([token for doc in docs for token in doc.tokens], dtype=torch.int32),
        "hidden": torch.stack([row for doc in docs for row in doc.hidden]),
        "offsets": offsets,
        "answer_starts": offsets[:-1] + torch.tensor([doc.answer_start for doc in docs]),
    }
    save_tensors(tensors, path, meta)
    return int(offsets[-1])


def parse_shares(text: str) -> dict[str, float]:
    try:
        return {name: float(share) for name, share in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not of the form source=share,source=share") from None


def require_space(output: Path, tokens: int, written: int, token_bytes: int) -> None:
    """Raises typer.BadParameter where the tokens that are still to be written do not fit the disk."""
    free = shutil.disk_usage(output).free
    if (tokens - written) * token_bytes > free:
        needed, there = tokens * token_bytes / 1e9, written * token_bytes / 1e9
        raise typer.BadParameter(
            f"--tokens {tokens} take {needed:.1f} GB, of which {there:.1f} GB are there, and {output} has "
            f"{free / 1e9:.1f} GB free: at most --tokens {written + free // token_bytes} fit"
        )


@interruptible("distill", "the shards written so far are kept: the same command goes on")
def main(
    model: Annotated[Path, typer.Option(help="Model folder written by fetch_model.py.")],
    prompts: Annotated[Path, typer.Option(help="JSONL with `source`, `prompt` and (for prefill) `response`.")],
    output: Annotated[Path, typer.Option(help="Folder for the shards; existing ones are kept and continued.")],
    tokens: Annotated[int, typer.Option(min=1, help="Stop when the folder holds this many tokens.")] = 5_000_000,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Generate with this engine bundle, built with --hidden-states (the fast way on a CPU)."),
    ] = None,
    source: Annotated[
        Source, typer.Option(help="`generate` answers, or `prefill` the prompts' own responses.")
    ] = Source.generate,
    shares: Annotated[
        str, typer.Option(help="How often each prompt source is drawn, as source=share,...")
    ] = "gpteacher-codegen=3,gpteacher-roleplay=3,gsm8k-train=2,t0-sample=1.5,self-instruct-seed=0.5",
    self_written: Annotated[
        float, typer.Option(min=0, max=1, help="Share of conversations whose prompt the target writes itself.")
    ] = 0.5,
    slots: Annotated[int, typer.Option(min=1, help="Sequences side by side (with a bundle: its slots).")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    shard_documents: Annotated[int, typer.Option(min=1, help="Documents per shard.")] = 128,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help=f"Write conversations to judge drafters by, of 1 in {RESERVED} prompts; no other run uses "
            "these, and train_drafter.py does not train on them.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed; shard k continues with seed + k.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 is torch's default.")] = 0,
) -> None:
    """Write teacher data (tokens and hidden states) for training drafters, without --bundle on a GPU where there is one
    (not run)."""
    torch.set_grad_enabled(False)
    if threads:
        torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = Target.from_folder(model, working_dtype(device)).to(device)
        tokenizer = AutoTokenizer.from_pretrained(model)
        engine = EngineForward(bundle, threads) if bundle else None
        done = sorted(output.glob("shard-*.safetensors"))
        seed += len(done) + HELD_OUT_SEED * held_out
        rows = read_prompts(prompts, parse_shares(shares), seed, held_out)
    except (BundleError, OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    template = Template.of(tokenizer)
    output.mkdir(parents=True, exist_ok=True)
    token_bytes = target.config.hidden_size * 2 + 4
    written = sum(file.stat().st_size for file in done) // token_bytes
    require_space(output, tokens, written, token_bytes)
    if source is Source.generate:
        around = len(template.prefix) + len(template.assistant)
        longest = MAX_USER_TOKENS + max_new_tokens
        if engine and engine.length <= around + longest:
            raise typer.BadParameter(
                f"{bundle} takes {engine.length} tokens, and a prompt of up to {longest} with an answer needs "
                f"more than {around + longest}: build it with a larger --max-len, or ask for fewer --max-new-tokens"
            )
        forward: Forward = engine or TorchForward(target, slots, around + longest + max_new_tokens)
        drawn = documents(rows, tokenizer, template, self_written, longest, random.Random(seed))
        generator = Generator(forward, set(target.config.eos_token_ids), template.prefix[:-1], seed)
        stream = generator.run(drawn, max_new_tokens, template.assistant)
    else:
        stream = prefill(target, rows, tokenizer, template, slots, MAX_USER_TOKENS + 2 * max_new_tokens)
    meta = {"model": str(model.name), "source": source.value, "shares": shares, "self_written": str(self_written)}
    meta |= {"held_out": "true"} if held_out else {}
    begun, fresh = time.monotonic(), 0
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("starting")
        for shard in itertools.count(len(done)):
            if written >= tokens:
                break
            docs = list(itertools.islice(stream, shard_documents))
            count = write_shard(output / f"shard-{shard:05d}.safetensors", docs, meta)
            written, fresh = written + count, fresh + count
            rate = fresh / (time.monotonic() - begun)
            line = (
                f"{written:,} of {tokens:,} tokens, {rate:.0f} tokens/s, {(tokens - written) / rate / 60:.0f} min left"
            )
            progress.update(task, description=line)
            if not sys.stderr.isatty():
                print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
