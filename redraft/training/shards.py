"""Shards of teacher data, beside them the documents under way, which a killed run leaves as one more shard."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from redraft.model_defs.files import read_tensors, save_tensors
from redraft.model_defs.weights.folder import files_with_weights
from redraft.training.teacher_data import LAYERS, USUAL_CUTOFF

LOOP_TOKENS = 48
LOOP_PERIODS = 16
LOOP_CHECK = 8
SAMPLED = 1 << 20


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
    """A folder of numbered shards. `running-N` beside the first N holds the answers that were under way with them: it
    is replaced when the next shard is closed, and becomes shard N where the run was killed before."""

    def __init__(self, folder: Path, meta: Mapping[str, str]):
        """`meta` is written into every file. Raises ValueError where the folder holds shards of another model or chat
        template, or one that is damaged."""
        self.folder, self.meta = folder, dict(meta)
        files = sorted(folder.glob("shard-*.safetensors"))
        self.count = 1 + int(files[-1].stem.removeprefix("shard-")) if files else 0
        """The next shard's number: that of one that was removed is not given again"""
        self.tokens, self.drawn = 0, 0
        """Tokens of the folder, and prompts that were drawn from the file for it"""
        self.cutoff: int | None = None
        """The rank below which the folder holds out prompts; None where it is empty"""
        self.other_prompts = False
        """Whether its last shard is of other prompts than `meta` tells"""
        for file in (*files, *([self._running()] if self._running().exists() else [])):
            self._read(file)

    def _read(self, file: Path) -> None:
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
        self.drawn = max(self.drawn, int(metadata.get("drawn", 0)))
        self.tokens += shape[0]

    def prompts(self, before: int, after: int) -> Iterator[tuple[int, ...]]:
        """The prompts of its documents, as token ids: each begins after `before` tokens, and ends `after` tokens before
        the answer."""
        for file in sorted(self.folder.glob("shard-*.safetensors")):
            shard = read_tensors(file)
            bounds = zip(shard["offsets"].tolist(), shard["answer_starts"].tolist(), strict=False)
            yield from (tuple(shard["tokens"][begin + before : answer - after].tolist()) for begin, answer in bounds)

    def begin(self) -> None:
        """Keep the answers that a killed run had under way, as they are."""
        if self._running().exists():
            self._running().rename(self._shard())
            self.count += 1

    def add(self, ended: Sequence[Document], under_way: Sequence[Document]) -> None:
        """Write a shard of the documents that ended, if any, and the answers under way."""
        self.folder.mkdir(parents=True, exist_ok=True)
        closed = self._shard() if ended else None
        self.count += bool(ended)
        answers = [doc for doc in under_way if doc.answered]
        meta = self.meta | {"drawn": str(self.drawn)}
        if answers:
            write_shard(self._running(), answers, meta)
        if closed:
            write_shard(closed, ended, meta)
            self.tokens += sum(len(doc.tokens) for doc in ended)
        for file in self.folder.glob("running-*.safetensors"):
            if not answers or file != self._running():
                file.unlink()

    def _shard(self) -> Path:
        return self.folder / f"shard-{self.count:05d}.safetensors"

    def _running(self) -> Path:
        return self.folder / f"running-{self.count:05d}.safetensors"


def write_shard(path: Path, docs: Sequence[Document], meta: Mapping[str, str]) -> None:
    """Write documents as a shard, whole or not at all."""
    save_tensors(_tensors(docs), path, meta)


def model_digest(folder: Path) -> str:
    """16 hexadecimal digits of a model's `config.json` and, of each file of weights, its size and SAMPLED bytes at
    either end: reading all would take minutes."""
    digest = sha256((folder / "config.json").read_bytes())
    for path in files_with_weights(folder):
        with path.open("rb") as file:
            digest.update(file.read(SAMPLED))
            size = file.seek(0, 2)
            file.seek(max(size - SAMPLED, 0))
            digest.update(file.read() + str(size).encode())
    return digest.hexdigest()[:16]


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
