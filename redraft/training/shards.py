"""Shards of teacher data, beside them the documents under way, which a killed run leaves as one more shard.

The header of each shard says what it is of: the model, the prompts, the seed, the run, and the rank that wrote it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open

from redraft.learning.shard_file import SHARDS
from redraft.model_defs.files import save_tensors
from redraft.training.ranks import ALONE, Ranks
from redraft.training.teacher_data import LAYERS, USUAL_CUTOFF, prompts_of

LOOP_TOKENS = 48
LOOP_PERIODS = 16
LOOP_CHECK = 8


@dataclass
class Document:
    """One conversation: `pending` tokens are fed as they are, further ones are drawn."""

    pending: deque[int]
    temperature: float
    writes_prompt: bool = False
    held_out: bool = False
    tokens: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    """bfloat16 [F] of each token but the last: its hidden state and, with target layers, what enters them"""
    answer_start: int = 0
    drawn: int = 0

    @property
    def answered(self) -> bool:
        """Whether it has a part of an answer."""
        return not self.writes_prompt and len(self.tokens) > self.answer_start > 0

    def loops(self) -> bool:
        """Whether the last LOOP_TOKENS tokens repeat with a short period (looked at every LOOP_CHECK tokens)."""
        if len(self.tokens) % LOOP_CHECK:
            return False
        tail = self.tokens[-LOOP_TOKENS:]
        return len(tail) == LOOP_TOKENS and any(tail[p:] == tail[:-p] for p in range(1, LOOP_PERIODS + 1))


class Shards:
    """A folder of numbered shards, which the ranks of a run fill together: rank i of n writes those of number i modulo
    n. `running-N` beside them holds the answers that a rank had under way when it closed the shard before N: it is
    replaced when the next shard is closed, and becomes shard N where the run was killed before."""

    def __init__(self, folder: Path, meta: Mapping[str, str], ranks: Ranks = ALONE):
        """`meta` is written into every file. Raises ValueError where the folder holds shards of another model or chat
        template, or one that is damaged."""
        self.folder, self.meta, self._ranks = folder, dict(meta), ranks
        self.cutoff: int | None = None
        """The hash below which the folder holds out prompts; None where it is empty"""
        self.run = ""
        """The run that it was begun by; empty where it was begun by none, or before runs had names"""
        self.other_prompts = False
        """Whether its last shard is of other prompts than `meta` tells"""
        self.answered: Counter[int] = Counter()
        """How many documents it holds of each prompt, by the hash of its token ids"""
        files = sorted(folder.glob(SHARDS))
        running = sorted(folder.glob("running-*.safetensors"))
        self._left, self._stale = _left_under_way(files, running)
        self._held = {_number(file): (file, self._read(file)) for file in (*files, *self._left)}
        self._running: Path | None = None
        self._take({number: tokens for number, (_, tokens) in self._held.items()})

    def _take(self, held: Mapping[int, int]) -> None:
        """Go on from these numbers of shards, each with its tokens."""
        self.tokens = sum(held.values())
        first = 1 + max(held, default=-1)
        self.number = first + (self._ranks.index - first) % self._ranks.count
        """The next shard's number: that of one that was removed is not given again"""

    def _read(self, file: Path) -> int:
        """The number of tokens of a shard that is of this run's model and division."""
        try:
            with safe_open(file, framework="pt") as shard:
                metadata, shape = shard.metadata() or {}, shard.get_slice("tokens").get_shape()
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}): remove it") from None
        for name in ("model", "model_digest"):
            if metadata.get(name, self.meta.get(name)) != self.meta.get(name):
                which = f"{metadata['model']}, not of {self.meta['model']}"
                another = which if name == "model" else f"another {self.meta['model']} than the one that is there now"
                raise ValueError(f"{file} is of {another}: give another folder, or remove this one")
        if metadata.get("chat_template", self.meta.get("chat_template")) != self.meta.get("chat_template"):
            raise ValueError(f"{file} is of another chat template: remove or rename {self.folder}")
        if metadata.get(LAYERS, "") != self.meta.get(LAYERS, ""):
            raise ValueError(
                f"{file} holds features of the layers {metadata.get(LAYERS) or 'none'}, asked for are "
                f"{self.meta.get(LAYERS) or 'none'}: give another folder, or remove this one"
            )
        self.other_prompts = metadata.get("prompts", self.meta.get("prompts")) != self.meta.get("prompts")
        cutoff = int(metadata.get("held_out_below", USUAL_CUTOFF))
        if ("held_out" in metadata) != ("held_out" in self.meta) or self.cutoff not in (None, cutoff):
            raise ValueError(f"{file} is of another division of prompts than {self.folder}: remove it")
        self.cutoff = cutoff
        self.run = self.run or metadata.get("run", "")
        return shape[0]

    def join(self, before: int, after: int) -> None:
        """Learn which prompts were answered, here and in the folders of ranks on other machines, and go on with their
        run, or begin one. Each prompt begins after `before` tokens of its document, and ends `after` tokens before the
        answer. Every rank must call it, and none may write before."""
        own = {
            number: (tokens, [hash(prompt) for prompt in prompts_of(file, before, after)])
            for number, (file, tokens) in self._held.items()
        }
        held: dict[int, tuple[int, list[int]]] = {}
        for of_rank in self._ranks.gather(own):
            held |= of_rank
        runs = filter(None, self._ranks.gather(self.run))
        self.run = self._ranks.from_first(next(runs, uuid4().hex))
        self.meta["run"] = self.run
        self._take({number: tokens for number, (tokens, _) in held.items()})
        self.answered = Counter(prompt for _, prompts in held.values() for prompt in prompts)

    def prompts(self, before: int, after: int) -> Iterator[tuple[int, ...]]:
        """The prompts of its documents, as token ids: each begins after `before` tokens, and ends `after` tokens before
        the answer."""
        for file in sorted(self.folder.glob(SHARDS)):
            yield from prompts_of(file, before, after)

    def begin(self) -> None:
        """Keep the answers that a killed run had under way, as they are."""
        for file in self._left:
            with suppress(FileNotFoundError):  # another rank kept it
                file.rename(self._shard(_number(file)))
        for file in self._stale:
            file.unlink(missing_ok=True)

    def add(self, ended: Sequence[Document], under_way: Sequence[Document]) -> None:
        """Write a shard of the documents that ended, if any, and the answers under way."""
        self.folder.mkdir(parents=True, exist_ok=True)
        closed = self._shard(self.number) if ended else None
        self.number += self._ranks.count if ended else 0
        answers = [doc for doc in under_way if doc.answered]
        running = self.folder / f"running-{self.number:05d}.safetensors" if answers else None
        if running:
            write_shard(running, answers, self.meta)
        if closed:
            write_shard(closed, ended, self.meta)
            self.tokens += sum(len(doc.tokens) for doc in ended)
        if self._running and self._running != running:
            self._running.unlink(missing_ok=True)
        self._running = running

    def _shard(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"


def _left_under_way(shards: Iterable[Path], running: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Two lists of `running`: the files that a killed run left, and the stale ones, whose shard is complete or whose
    rank left an earlier file."""
    written = {_number(file) for file in shards}
    left: dict[str, Path] = {}
    stale = []
    for file in running:
        writer = _writer(file)
        if _number(file) in written or writer in left:
            stale.append(file)
        else:
            left[writer] = file
    return list(left.values()), stale


def _writer(file: Path) -> str:
    """The rank that wrote a file; of one that is damaged, which reading refuses, its name."""
    try:
        with safe_open(file, framework="pt") as opened:
            return (opened.metadata() or {}).get("rank", "")
    except SafetensorError:
        return file.name


def _number(file: Path) -> int:
    return int(file.stem.rpartition("-")[2])


def write_shard(path: Path, docs: Sequence[Document], meta: Mapping[str, str]) -> None:
    """Write documents as a shard, whole or not at all."""
    save_tensors(_tensors(docs), path, meta)


def _tensors(docs: Sequence[Document]) -> dict[str, torch.Tensor]:
    """The last token's hidden state, which nothing reads, is that of the one before."""
    offsets = torch.tensor([0, *itertools.accumulate(len(doc.tokens) for doc in docs)])
    hidden = (row for doc in docs for row in (*doc.hidden, doc.hidden[-1])[: len(doc.tokens)])
    return {
        "tokens": torch.tensor([token for doc in docs for token in doc.tokens], dtype=torch.int32),
        "hidden": torch.stack(list(hidden)),
        "offsets": offsets,
        "answer_starts": offsets[:-1] + torch.tensor([doc.answer_start for doc in docs]),
    }
