"""Write teacher data: token sequences with the target's last hidden states.

Two sources, one format:

  generate   the target answers prompts (greedy or sampled); a share of the prompts it writes itself,
             sampled from an empty user turn; all of them without --prompts
  prefill    the target reads the prompts' own responses; no generation, so several times faster

The output folder holds numbered safetensors shards: `tokens` int32 [N], `hidden` bfloat16 [N, H]
(hidden[t] is the state after the final norm whose logits predict tokens[t + 1]; with --target-layers,
what enters each of them stands after it), `offsets` int64 [documents + 1] and `answer_starts` int64
[documents] (positions in N). A shard appears whole or not at
all. The command can be killed at any time and goes on with what was there SHARD_S before: when a shard
is closed, the answers under way are written beside it.

It also writes conversations to judge drafters by, into --held-out. Their prompts, 1 in 64 by a hash of the text and at
least one, are in no training data.
"""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from safetensors import SafetensorError

from redraft.bundle.backends import OPENVINO, Backend
from redraft.bundle.folder import MANIFEST
from redraft.chat import template_digest
from redraft.cli.options import ColumnOption, ModelOption, PromptsOption, ThreadsOption, check_folder
from redraft.cli.steps import Steps
from redraft.compiler.built_from import require_model
from redraft.compiler.checkpoints.source import load_tokenizer
from redraft.console.interrupt import interruptible
from redraft.console.progress import duration, progress
from redraft.console.resources import require_memory
from redraft.home import DEFAULT_MODEL, data_of
from redraft.model_defs.drafters.eagle3 import parse_layers
from redraft.model_defs.precision import working_dtype
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target, give_layers
from redraft.model_defs.weights.folder import count_numbers, model_digest
from redraft.prompts import Prompt, load_prompts, read_prompts
from redraft.training.conversations import Generator, Lengths, Template
from redraft.training.forward import EngineForward, TorchForward
from redraft.training.parts import (
    HELD_OUT_SHARE,
    LEAST_HELD_OUT,
    MOST_HELD_OUT,
    held_out_tokens,
    open_parts,
    require_space,
)
from redraft.training.prompts import LEAST_RESPONSE, RESERVED, answerable, parse_shares, prompts_digest
from redraft.training.ranks import ranked, this_rank, versions
from redraft.training.teacher_data import LAYERS
from redraft.training.writing import (
    SHARD_S,
    cache_bytes,
    generate,
    own_documents,
    read_responses,
    say,
    say_origin,
    say_plan,
    write,
)

FEWEST_TO_TRAIN_ON = 1_000
MAX_TOKENS = 256


class Source(StrEnum):
    generate = "generate"
    prefill = "prefill"


def engine_of(data: Path) -> Path:
    """The folder of the engine bundle that writes teacher data."""
    return data.with_name(f"{data.name}-engine")


def teacher_engine(
    model: Path,
    data: Path,
    layers: str | None,
    steps: Steps,
    backend: Backend = OPENVINO,
    max_tokens: int = MAX_TOKENS,
) -> Path:
    """The engine bundle that writes teacher data into a folder, built where it is missing: many short sequences side by
    side. Raises ValueError for a damaged model."""
    template = Template.of(load_tokenizer(model))
    length = Lengths.within(TargetConfig.load(model).max_position, template, max_tokens).whole
    options = {"--model": str(model), "--no-drafter": "", "--features": "", "--slots": "64", "--max-tree": "1"}
    options |= {"--max-len": str(length), "--prefill-chunk": "64", "--replace": "", "--output": str(engine_of(data))}
    options |= {"--target-layers": layers} if layers else {}
    options |= {"--backend": backend.name}
    return Path(steps.built_bundle(options)["--output"])


@interruptible("redraft distill", "what was written so far is kept: the same command goes on")
@ranked("redraft distill", "what was written so far is kept: the same command goes on")
@torch.no_grad()
def main(
    model: ModelOption = Path(DEFAULT_MODEL),
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the shards; existing ones are kept and continued. Default: REDRAFT_HOME/data/NAME."
        ),
    ] = None,
    prompts: PromptsOption = None,
    column: ColumnOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="Stop when the folder holds this many tokens.")] = 5_000_000,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder for conversations to judge drafters by, of prompts that nothing is trained on (1 in "
            f"{RESERVED}): {HELD_OUT_SHARE:.0%} of --tokens, between {LEAST_HELD_OUT:,} and {MOST_HELD_OUT:,}. "
            "Default: beside --output."
        ),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Generate with this engine bundle, built with --features. Default: one that is built beside --output; "
            "torch on a GPU.",
        ),
    ] = None,
    engine: Annotated[
        bool | None,
        typer.Option(
            "--engine/--no-engine",
            help="Whether a bundle generates: 2.5 times as fast on a CPU as torch. Default: where there is no GPU.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        Source, typer.Option(help="`generate` answers, or `prefill` the prompts' own responses.")
    ] = Source.generate,
    shares: Annotated[
        str | None,
        typer.Option(
            help="How often each prompt source is drawn, as source=share,...; a source not named is not. Default: "
            "every prompt as often as another.",
            show_default=False,
        ),
    ] = None,
    self_written: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of conversations whose prompt the target writes itself."),
    ] = 0.5,
    slots: Annotated[int, typer.Option(min=1, help="Sequences side by side (with a bundle: its slots).")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = MAX_TOKENS,
    target_layers: Annotated[
        str | None,
        typer.Option(
            help="Store what enters these layers of the target too, as drafters eagle3 need: numbers with + between "
            "them, or `usual`. A bundle must have been built with the same. Default: none.",
            show_default=False,
        ),
    ] = None,
    shard_documents: Annotated[
        int, typer.Option(min=1, help=f"Documents per shard; one is closed after {SHARD_S:.0f} s too.")
    ] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the prompts' order and of sampling.")] = 0,
    threads: ThreadsOption = None,
) -> None:
    """Write teacher data (tokens and hidden states) for training drafters."""
    ranks = this_rank()
    if threads := threads or ranks.threads:
        torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    output = output or data_of(model.name, target_layers)
    held_out = held_out or output.with_name(f"{output.name}-held-out")
    reads = source is Source.prefill
    if engine is None:
        engine = not (bundle or reads or device.type == "cuda")
    folders = {output: tokens} | {held_out: held_out_tokens(tokens)}
    meta = {"model": model.name, "source": source.value, "shares": shares or "", "self_written": str(self_written)}
    meta |= {"seed": str(seed), "rank": str(ranks)}
    writes_prompts = self_written if source is Source.generate else 0.0
    texts: list[Prompt] = []
    try:
        with ranks.agreement() as facts:
            check_folder(output, "--output")
            check_folder(held_out, "--held-out")
            if engine and (bundle or reads):
                raise ValueError("--engine builds a bundle that generates: give no --bundle, and --source generate")
            if held_out == output:
                raise ValueError(f"--held-out {held_out}: expected another folder than --output")
            if bundle:
                require_model(bundle, model)
            if prompts:
                texts = load_prompts(prompts, column) if ranks.first else read_prompts(prompts, column).prompts
            elif source is Source.prefill:
                raise ValueError("--source prefill reads the responses of --prompts, and there are none")
            else:
                self_written = writes_prompts = 1.0
            meta |= {"prompts": prompts_digest(texts), "chat_template": template_digest(model) or ""}
            config = TargetConfig.load(model)
            layers = parse_layers(target_layers, config.num_layers) if target_layers else ()
            meta |= {LAYERS: "+".join(map(str, layers))} if layers else {}
            tokenizer = load_tokenizer(model)
            template = Template.of(tokenizer)
            lengths = Lengths.within(config.max_position, template, max_tokens)
            user = lengths.user
            if source is Source.prefill:
                user = lengths.whole - len(template) - LEAST_RESPONSE - 1
            if prompts:
                texts, left_out = answerable(prompts, texts, tokenizer, user, source is Source.prefill)
                for line in left_out:
                    say(line)
            else:
                say_origin(template)
            meta["model_digest"] = model_digest(model)
            parts = open_parts(
                prompts, texts, parse_shares(shares) if shares else {}, writes_prompts, folders, meta, ranks
            )
            facts |= {"versions": versions(), "model": meta["model_digest"], "chat template": meta["chat_template"]}
            facts |= {"prompts": meta["prompts"], "held-out prompts": parts[0].shards.meta["held_out_below"]}
            facts["options"] = (
                f"--source {source.value} --tokens {tokens} --shares {shares} --self-written {self_written} "
                f"--max-tokens {max_tokens} --target-layers {target_layers} --seed {seed}"
            )
        for part in parts:
            part.shards.join(len(template.prefix), len(template.assistant))
        with ranks.agreement():
            feature_size = config.hidden_size * (1 + len(layers))
            token_bytes = feature_size * 2 + 4
            numbers = count_numbers(model)
            cache = cache_bytes(config, slots, lengths.whole) if source is Source.generate else 0
            memory = 2 * numbers + cache
            engine_bytes = 2 * numbers if engine and not (engine_of(output) / MANIFEST).exists() else 0
            require_space(parts, -(-token_bytes * ranks.local_count // ranks.count), engine_bytes)
            require_memory(memory * ranks.local_count, "distillation")
            say_plan(parts, token_bytes, numbers, memory, engine_bytes)
            names = " and ".join(map(str, folders))
            full = all(part.held >= part.wanted for part in parts)
            of_others = any(part.shards.other_prompts for part in parts)
            if full and of_others:
                raise ValueError(
                    f"{names} already hold as many tokens as are asked for, of other prompts: remove or rename them, "
                    "or ask for more"
                )
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    if tokens < FEWEST_TO_TRAIN_ON:
        say(f"fewer than about {FEWEST_TO_TRAIN_ON:,} tokens cannot be trained on")
    for part in parts:
        part.shards.begin()
    if full:
        say(f"{names} already hold what is asked for")
        return
    if of_others:
        say(f"{names} hold conversations of other prompts, which are kept: remove or rename them to begin anew")
    if engine:  # of the ranks that share a disk the first one builds it
        steps = Steps(ranks.program("redraft distill"))
        bundle = ranks.in_turn(lambda: teacher_engine(model, output, target_layers, steps, max_tokens=max_tokens))
    for part in parts:
        part.take_share()
    held = sum(part.held for part in parts)
    name = "distill" if ranks.count == 1 else f"distill, rank {ranks}"
    console = Console(stderr=True, quiet=not ranks.first)
    with progress(name, sum(part.wanted for part in parts), "tokens", "loading the target", console) as bar:
        try:
            with ranks.agreement():
                written_by = EngineForward(bundle, threads) if bundle and not reads else None
                if written_by and written_by.length <= len(template) + user:
                    raise ValueError(
                        f"{bundle} takes {written_by.length} tokens, and a prompt of up to {user} with an answer needs "
                        f"more than {len(template) + user}: build it with --max-len {lengths.whole}"
                    )
                if written_by and written_by.feature_size != feature_size:
                    raise ValueError(
                        f"{bundle} gives features of {written_by.feature_size} numbers, {feature_size} are asked for: "
                        f"build it with --features{f' --target-layers {target_layers}' if layers else ''}"
                    )
                target = None if written_by else Target.from_folder(model, working_dtype(device)).to(device)
                if target and layers:
                    give_layers(target, layers)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None
        begun = time.monotonic()
        try:
            if target and reads:
                stream = read_responses(target, parts, tokenizer, template, slots, lengths.whole, seed)
                write(bar, stream, parts, shard_documents)
            else:
                forward = TorchForward(target, slots, lengths.whole) if target else written_by
                assert forward is not None
                ends = set(config.eos_token_ids)
                generator = Generator(forward, ends, template.prefix[:-1], parts[0].seed(seed))
                rate, left = generator.rate(), sum(max(part.wanted - part.held, 0) for part in parts)
                say(f"about {duration(left / rate)} at {rate:,.0f} tokens/s, as a few steps took")
                for part in parts if self_written else ():
                    generator.written.update(part.shards.prompts(len(template.prefix), max(len(template.assistant), 1)))
                documents = {
                    part.held_out: own_documents(part, tokenizer, template, self_written, seed) for part in parts
                }
                generate(bar, generator, parts, documents, template, lengths.answer, shard_documents)
        except (OSError, SafetensorError) as error:
            raise typer.BadParameter(ranks.named(f"{error}; the same command goes on")) from None
    count = sum(part.held for part in parts) - held
    speed = count / (time.monotonic() - begun)
    whose = f"rank {ranks} " if ranks.count > 1 else ""
    print(f"distill: {whose}wrote {count:,} tokens at {speed:,.0f} tokens/s", file=sys.stderr, flush=True)
