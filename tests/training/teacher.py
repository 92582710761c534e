"""A tiny random teacher: its tokenizer, its answers as teacher data, and drafters that are trained on them."""

from __future__ import annotations

import faulthandler
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import typer
from safetensors.torch import load_file
from torch.distributed import TCPStore

from redraft.cli import distill
from redraft.cli import train as command
from redraft.model_defs.target.model import Target
from redraft.training import conversations
from redraft.training import prompts as teacher_prompts
from redraft.training.forward import TorchForward
from redraft.training.shards import Document
from redraft.training.teacher_data import USUAL_CUTOFF

VOCAB, END = 111, 2


LETTERS = SimpleNamespace(
    chat_template="<>",
    apply_chat_template=lambda messages, **_: f"<{messages[0]['content']}>",
    encode=lambda text, **_: [ord(character) for character in text],
)
"""A tokenizer: every character is one."""


def generate(
    target: Target, count: int, prompts: list[list[int]], slots: int = 3, prefix: tuple[int, ...] = (7, 8, 9)
) -> list[Document]:
    docs = (Document(deque(prompt), 0.0, answer_start=len(prefix) + len(prompt)) for prompt in itertools.cycle(prompts))
    generator = conversations.Generator(TorchForward(target, slots, 64), {END}, list(prefix), seed=0)
    stream = generator.run(partial(next, docs), 20, [END, 5])
    return list(itertools.islice(itertools.chain.from_iterable(stream), count))


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts_of(file: Path) -> list[list[int]]:
    """The documents of a shard."""
    shard = load_file(file)
    return [shard["tokens"][begin:end].tolist() for begin, end in itertools.pairwise(shard["offsets"].tolist())]


def begun_with(folder: Path) -> set[str]:
    """What the users of all conversations of a folder say."""
    texts: set[str] = set()
    for file in folder.glob("shard-*.safetensors"):
        texts |= set(prompts_of(load_file(file)))
    return texts


def prompts_of(shard: dict[str, torch.Tensor]) -> list[str]:
    """What the user says in each conversation of a shard."""
    places = zip(shard["offsets"][:-1].tolist(), shard["answer_starts"].tolist(), strict=True)
    return ["".join(map(chr, shard["tokens"][begin + 1 : answer - 1].tolist())) for begin, answer in places]


def write_teacher(folder: Path, prompts: Path | None, tokens: int = 600, **more) -> tuple[Path, Path]:
    """The folders to train on and held out that distilling with this file filled."""
    where = {"model": folder, "prompts": prompts, "output": folder / "data", "held_out": folder / "held"}
    run = {"tokens": tokens, "slots": 8, "max_tokens": 12, "self_written": 0, "threads": 1, "engine": False}
    distill.main(**where | run | more)
    return folder / "data", folder / "held"


UNRESERVED = [text for text in map(str, range(300)) if teacher_prompts.prompt_hash(text) >= USUAL_CUTOFF]


RESERVED = [text for text in map(str, range(300)) if teacher_prompts.prompt_hash(text) < USUAL_CUTOFF]


SHAPES: dict[str, dict] = {
    "recurrent": {"settings": ["exit_dim=32", "num_blocks=1"], "window": 8},
    "hidden_state": {"settings": ["info_vocabulary=40", "info_rank=8"], "window": 24},
    "eagle": {"window": 24},
    "eagle3": {"settings": ["target_layers=0+1+2"], "window": 24},
    "medusa": {"settings": ["heads=3"], "window": 8},
    "draft_lm": {"window": 24},
}


def train(taught: Path, output: Path, drafter: str, positions: int, **more) -> list[dict]:
    """Train a drafter. Returns the lines of its log."""
    run_training(taught, output, drafter, positions, **more)
    return [json.loads(line) for line in (output / "log.jsonl").open()]


def run_training(taught: Path, output: Path, drafter: str, positions: int, **more) -> None:
    data = taught / ("layers" if drafter == "eagle3" else "data")
    where = {"model": taught, "data": [data], "output": output, "kind": drafter}
    run = {
        "hot_tokens": 64,
        "unroll": 3,
        "batch": 4,
        "positions": positions,
        "held_out_shards": 1,
        "every": 25,
        "threads": 1,
    }
    command.main(**where | run | SHAPES[drafter] | more)


def on_ranks(folder: Path, *work: Callable[[], object]) -> list[tuple[int | None, str]]:
    """Run each of these in a process of its own, which is a rank as torchrun starts it. Returns their exit statuses and
    what they wrote to standard error. Fails where one does not end, with the stacks of its threads."""
    folder.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process = multiprocessing.get_context("fork").Process
    places = ((rank, len(work), store.port, folder, act) for rank, act in enumerate(work))
    children = [process(target=_on_rank, args=place) for place in places]
    try:
        for child in children:
            child.start()
        ends = time.monotonic() + 120
        for child in children:
            child.join(max(ends - time.monotonic(), 0))
        stuck = [rank for rank, child in enumerate(children) if child.is_alive()]
        for rank in stuck:
            os.kill(children[rank].pid, signal.SIGUSR1)
        if stuck:
            time.sleep(1)  # until its threads' stacks are in its log
    finally:
        for child in children:
            if child.pid:
                child.kill()
                child.join()
    said = [(folder / f"{rank}.log").read_text() for rank in range(len(work))]
    assert not stuck, f"ranks {stuck} did not end:\n" + "\n".join(said)
    return [(child.exitcode, text) for child, text in zip(children, said, strict=True)]


def _on_rank(rank: int, count: int, port: int, folder: Path, act: Callable[[], object]) -> None:
    os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.register(signal.SIGUSR1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    os.environ |= dict(zip(names, map(str, (rank, count, rank, count, port)), strict=True))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    try:
        act()
    except typer.BadParameter as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except typer.Exit as error:
        sys.exit(error.exit_code)
