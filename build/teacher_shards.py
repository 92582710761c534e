"""Shards of teacher data, and the documents under way that a run which was ended goes on with."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model_defs.files import save_tensors
from model_defs.windows import USUAL_CUTOFF

LOOP_TOKENS = 48
LOOP_PERIODS = 16
LOOP_CHECK = 8


STATE = ("temperature", "writes_prompt", "held_out", "answer_start", "drawn")
"""What of a document under way is stored beside its tokens and hidden states."""


@dataclass
class Document:
    """One conversation: `pending` tokens are fed as they are, further ones are drawn."""

    pending: deque[int]
    temperature: float
    writes_prompt: bool = False
    held_out: bool = False
    tokens: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    """bfloat16 [H] of each token but the last"""
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
    """A folder of numbered shards. Beside them lies what is under way: `running-N` belongs to the first N shards, so
    that a shard and what it leaves under way appear together or not at all."""

    def __init__(self, folder: Path, meta: Mapping[str, str]):
        """`meta` is written into every file. Raises ValueError where the folder holds another model's shards or one
        that is damaged."""
        self.folder, self.meta = folder, dict(meta)
        self.count, self.tokens = 0, 0
        self.cutoff: int | None = None
        """The rank below which the folder holds out prompts; None where it is empty"""
        files = sorted(folder.glob("shard-*.safetensors"))
        for file in (*files, *folder.glob("running-*.safetensors")):
            self._read(file)
        self.count = len(files)

    def _read(self, file: Path) -> None:
        try:
            with safe_open(file, framework="pt") as shard:
                metadata, shape = shard.metadata() or {}, shard.get_slice("tokens").get_shape()
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}): remove it") from None
        if metadata.get("model", self.meta["model"]) != self.meta["model"]:
            raise ValueError(f"{file} is of {metadata['model']}, not of {self.meta['model']}: give another --output")
        self.cutoff = int(metadata.get("held_out_below", USUAL_CUTOFF))
        self.tokens += shape[0] if file.name.startswith("shard-") else 0

    def add(self, ended: Sequence[Document], running: Sequence[Document]) -> None:
        """Write a shard of the documents that ended, if any, and what is under way."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.count += bool(ended)
        begun = [doc for doc in running if doc.hidden]
        states = [{name: getattr(doc, name) for name in STATE} | {"pending": [*doc.pending]} for doc in begun]
        if begun:
            save_tensors(_tensors(begun), self._running(), self.meta | {"documents": json.dumps(states)})
        if ended:
            write_shard(self.folder / f"shard-{self.count - 1:05d}.safetensors", ended, self.meta)
            self.tokens += sum(len(doc.tokens) for doc in ended)
        for file in self.folder.glob("running-*.safetensors"):
            if not begun or file != self._running():
                file.unlink()

    def running(self) -> list[Document]:
        """The documents that were under way."""
        file = self._running()
        if not file.exists():
            return []
        with safe_open(file, framework="pt") as stored:
            states = json.loads(stored.metadata()["documents"])
            offsets, tokens, hidden = (stored.get_tensor(name) for name in ("offsets", "tokens", "hidden"))
        docs = []
        for state, (begin, end) in zip(states, itertools.pairwise(offsets.tolist()), strict=True):
            own = {"tokens": tokens[begin:end].tolist(), "hidden": list(hidden[begin : end - 1])}
            docs.append(Document(**state | own | {"pending": deque(state["pending"])}))
        return docs

    def _running(self) -> Path:
        return self.folder / f"running-{self.count:05d}.safetensors"


def write_shard(path: Path, docs: Sequence[Document], meta: Mapping[str, str]) -> None:
    """Write documents as a shard, whole or not at all."""
    save_tensors(_tensors(docs), path, meta)


def _tensors(docs: Sequence[Document]) -> dict[str, torch.Tensor]:
    """A last token without a hidden state, which nothing reads, takes the one before."""
    offsets = torch.tensor([0, *itertools.accumulate(len(doc.tokens) for doc in docs)])
    hidden = (row for doc in docs for row in (*doc.hidden, doc.hidden[-1])[: len(doc.tokens)])
    return {
        "tokens": torch.tensor([token for doc in docs for token in doc.tokens], dtype=torch.int32),
        "hidden": torch.stack(list(hidden)),
        "offsets": offsets,
        "answer_starts": offsets[:-1] + torch.tensor([doc.answer_start for doc in docs]),
    }
