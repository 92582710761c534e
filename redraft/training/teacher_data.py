"""Teacher data: shards of documents, read as windows to train on and windows held out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from redraft.learning.shard_file import FINGERPRINT, PROMPTS, SERVED, SHARDS, prompt_hash
from redraft.model_defs.drafters.windows import NO_DOCUMENT, Windows

SHARDS_AT_ONCE = 4
"""Shards that are in memory, and shuffled together, at a time; more where they hold less than a batch."""
USUAL_HELD_OUT = 4
"""Shards that a drafter is judged on, unless a number is given."""
LARGEST_SHARE_HELD_OUT = 0.25
"""Share of the training shards that is held out at most, where there are no others to judge by."""
SAMPLED_POSITIONS = 10_000
"""Positions of a sample, which begins a drafter's training."""
USUAL_CUTOFF = 2**64 // 64
"""The hash below which `redraft distill` holds prompts out, where a shard does not say another."""
EVALUATION_DOCUMENTS = 24
"""Documents of a held-out shard that a drafter is judged on."""
LAYERS = "target_layers"
"""A shard's entry of the layers whose inputs stand after the hidden states, as 2+15+27."""
POSITIONS_MULTIPLE = 32
"""Batches have such numbers of positions, so that matrices have few sizes: a kernel is compiled for each new one."""


@dataclass(frozen=True)
class _Plan:
    """How a shard is cut into windows: rows of the shard [W, S], documents [W, S], and answers bool [W, N]."""

    file: Path
    rows: Tensor
    documents: Tensor
    answers: Tensor

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with safe_open(self.file, framework="pt") as shard:
            tokens, features = shard.get_tensor("tokens"), shard.get_tensor("hidden")[self.rows]
            layers = layers_of(shard.metadata() or {})
        size = features.shape[-1] // (1 + len(layers))
        return tokens[self.rows].long(), features[..., :size], self.documents, features[..., size:]


def layers_of(metadata: Mapping[str, str]) -> tuple[int, ...]:
    """The layers whose inputs a shard holds."""
    return tuple(int(layer) for layer in metadata.get(LAYERS, "").split("+") if layer)


def _read(plans: Sequence[_Plan]) -> list[Tensor]:
    """Tokens, hidden states, documents and layers of the windows of several shards."""
    return [torch.cat(part) for part in zip(*(plan.read() for plan in plans), strict=True)]


def _windows(plans: Sequence[_Plan], length: int) -> Windows:
    """The windows of several shards, their positions in order."""
    answers = torch.cat([plan.answers for plan in plans])
    tokens, hidden, documents, layers = _read(plans)
    positions = torch.arange(length).expand(len(answers), length)
    return Windows(tokens, hidden, documents, positions, answers, layers if layers.shape[-1] else None)


class TeacherData:
    """Shards that redraft distill wrote, or a service with --learn."""

    def __init__(self, folders: Sequence[Path], held_out: int | None, prompts: bool):
        """Shards of `redraft distill --held-out` are not trained on, and the first `held_out` of them are for
        evaluation; where there are none, the first of the first folder. None is USUAL_HELD_OUT, of the first folder at
        most LARGEST_SHARE_HELD_OUT. With `prompts`, windows hold whole documents and only answers are drafted; without,
        they hold the answers only.

        Raises ValueError where a folder has no shard, or where training shards may hold held-out prompts.
        """
        if len({folder.resolve() for folder in folders}) < len(folders):
            raise ValueError(f"a folder is given twice, in {', '.join(map(str, folders))}: give each once")
        files = [sorted(folder.glob(SHARDS)) for folder in folders]
        missing = [str(folder) for folder, in_folder in zip(folders, files, strict=True) if not in_folder]
        if missing:
            raise ValueError(f"no {SHARDS} in {missing}; write some with redraft distill")
        self.prompts = prompts
        metadata = {file: _metadata(file) for in_folder in files for file in in_folder}
        reserved = [file for file, values in metadata.items() if "held_out" in values]
        if held_out is None:
            most = len(reserved) or max(int(LARGEST_SHARE_HELD_OUT * len(files[0])), len(files[0]) > 1)
            held_out = min(USUAL_HELD_OUT, most)
        self.evaluation = (reserved or files[0])[:held_out]
        kept = {*reserved, *self.evaluation}
        self._training = [file for in_folder in files for file in in_folder if file not in kept]
        self._folder, self._kept, self._metadata = folders[0], kept, metadata
        self._held_out_prompts = {prompt for file in reserved for prompt in prompt_hashes(file)}
        self._check_division(reserved, metadata)
        _check_overlap(metadata)

    def _check_division(self, reserved: list[Path], metadata: Mapping[Path, Mapping[str, str]]) -> None:
        """Raises ValueError where prompts of the reserved shards may have been trained on: those of a small file are
        held out by a hash of their own."""
        below = {file: int(values.get("held_out_below", USUAL_CUTOFF)) for file, values in metadata.items()}
        highest = max(reserved, key=lambda file: below[file], default=None)
        if highest and (mixed := [file for file in self._training if below[file] < below[highest]]):
            raise ValueError(
                f"{mixed[0].parent} may hold prompts that {highest.parent} holds out: write both with one "
                "redraft distill"
            )

    def require_model(self, name: str, digest: str) -> None:
        """Raises ValueError where a shard is of another model than the one of this name and `model_digest`."""
        for file, values in self._metadata.items():
            if values.get("model_digest", digest) != digest:
                which = values["model"] if values["model"] != name else f"another {name} than the one that is there now"
                raise ValueError(f"{file.parent} holds teacher data of {which}, not of {name}: leave it out of --data")

    def require_target(self, fingerprint: str) -> None:
        """Raises ValueError where a shard was served by another target than the one of this `target_fingerprint`."""
        for file, values in self._metadata.items():
            if values.get(FINGERPRINT, fingerprint) != fingerprint:
                raise ValueError(f"{file} holds answers of another target than this model: leave it out of --data")

    def require_layers(self, layers: tuple[int, ...]) -> None:
        """Raises ValueError where a shard lacks what enters these layers of the target."""
        for file, values in self._metadata.items():
            if layers and (stored := layers_of(values)) != layers:
                raise ValueError(
                    f"{file} holds features of the layers {stored or 'none'}, the drafter reads {layers}: write "
                    f"teacher data with redraft distill --target-layers {'+'.join(map(str, layers))}"
                )

    @property
    def has_served(self) -> bool:
        """Whether a shard holds answers that a service stored."""
        return any(values.get("source") == SERVED for values in self._metadata.values())

    @property
    def training(self) -> list[Path]:
        """The shards to train on. Raises ValueError where there are none."""
        if not self._training:
            raise ValueError(f"{self._folder} holds only the {len(self._kept)} held-out shards")
        return self._training

    def __str__(self) -> str:
        """How many shards are trained on, with a digest of what tells them from others: names, sizes and origins."""
        shards = [[file.name, file.stat().st_size, self._metadata[file]] for file in self.training]
        digest = sha256(json.dumps(shards, sort_keys=True).encode()).hexdigest()
        return f"{len(shards)} shards ({digest[:8]})"

    def answers(self) -> Iterator[Tensor]:
        """The tokens int64 [n] of every answer to train on."""
        for file in self.training:
            _, answers, ends = self._trained(file)
            with safe_open(file, framework="pt") as shard:
                tokens = shard.get_tensor("tokens").long()
            for answer, end in zip(answers.tolist(), ends.tolist(), strict=True):
                yield tokens[answer:end]

    def count_answers(self) -> int:
        """How many answers are trained on."""
        return sum(len(self._trained(file)[0]) for file in self.training)

    def count_tokens(self, vocab_size: int) -> Tensor:
        """How often the answers hold each token: int64 [V]."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for tokens in self.answers():
            counts += torch.bincount(tokens, minlength=vocab_size)
        return counts

    def require(self, size: int, length: int, unroll: int) -> None:
        """Raises ValueError where there is no shard to train on, or all hold fewer windows than a batch of `size`."""
        count = 0
        for file in self.training:
            count += len(self._plan(file, length, unroll).rows)
            if count >= size:
                return
        raise ValueError(
            f"{self._folder} holds {count} windows of {length} positions, fewer than a batch of {size}: "
            "distil more tokens, or give a smaller --batch"
        )

    def sample(self, length: int, unroll: int, least: int = SAMPLED_POSITIONS) -> Windows:
        """The windows of so many training shards that they hold at least `least` positions, those in order."""
        plans: list[_Plan] = []
        for file in self.training:
            plans.append(self._plan(file, length, unroll))
            if sum(int(plan.answers.sum()) for plan in plans) >= least:
                break
        return _windows(plans, length)

    def held_out(self, length: int, unroll: int) -> Iterator[Windows]:
        """The windows of the held-out documents, a shard at a time, their positions in order. Which positions are
        judged does not depend on `length` or `prompts`."""
        for file in self.evaluation:
            yield _windows([self._plan(file, length, unroll, slice(EVALUATION_DOCUMENTS))], length)

    def held_out_answers(self, length: int, unroll: int, most: int) -> Iterator[tuple[int, Windows]]:
        """The prompt's hash and the windows, as by `held_out`, of up to `most` held-out documents, one at a time."""
        for file in self.evaluation:
            for index, prompt in enumerate(prompt_hashes(file)[:most]):
                plan = self._plan(file, length, unroll, slice(index, index + 1))
                if len(plan.rows):
                    yield prompt, _windows([plan], length)
                    most -= 1

    def batches(
        self,
        size: int,
        length: int,
        unroll: int,
        seed: int,
        skip: int = 0,
        pieces: int = 1,
        taken: Sequence[int] = (0,),
    ) -> Iterator[Windows]:
        """Endless shuffled batches of `size` windows of `length` positions, those in random order; the first `skip`
        are passed over (resuming). Of the `pieces` that a batch is cut into, those `taken`, one after the other."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.training), generator=generator)
            for plans in self._groups(order.tolist(), size, length, unroll):
                answers = torch.cat([plan.answers for plan in plans])
                shuffled = torch.randperm(len(answers), generator=generator)
                order_of = torch.rand(answers.shape, generator=generator) + ~answers
                batches = [rows for rows in shuffled.split(size) if len(rows) == size]
                skip, batches = max(0, skip - len(batches)), batches[skip:]
                if not batches:
                    continue
                tokens, hidden, documents, layers = _read(plans)
                for rows in batches:
                    most = int(answers[rows].sum(-1).max())
                    most = min(most + -most % POSITIONS_MULTIPLE, length)
                    for own in (rows.tensor_split(pieces)[piece] for piece in taken):
                        positions = order_of[own].argsort(dim=-1)[:, :most]
                        drafted = answers[own].gather(1, positions)
                        read = layers[own] if layers.shape[-1] else None
                        yield Windows(tokens[own], hidden[own], documents[own], positions, drafted, read)

    def _groups(self, order: Sequence[int], size: int, length: int, unroll: int) -> Iterator[list[_Plan]]:
        """The training shards in this order, by SHARDS_AT_ONCE or by so many as fill a batch."""
        plans: list[_Plan] = []
        for index in order:
            plans.append(self._plan(self.training[index], length, unroll))
            if len(plans) >= SHARDS_AT_ONCE and sum(len(plan.rows) for plan in plans) >= size:
                yield plans
                plans = []
        if plans:
            yield plans

    def _trained(self, file: Path) -> tuple[Tensor, Tensor, Tensor]:
        """The documents of a training shard, without those whose prompt is held out: one rank may have the target write
        a prompt for training that another's target wrote to be judged by."""
        starts, answers, ends = _documents(file)
        if not self._held_out_prompts:
            return starts, answers, ends
        kept = torch.tensor([prompt not in self._held_out_prompts for prompt in prompt_hashes(file)], dtype=torch.bool)
        return starts[kept], answers[kept], ends[kept]

    def _plan(self, file: Path, length: int, unroll: int, documents: slice = slice(None)) -> _Plan:
        """Some documents back to back, cut every `length` rows; windows without a position to draft from are left
        out."""
        trained = _documents(file) if file in self._kept else self._trained(file)
        starts, answers, ends = (part[documents] for part in trained)
        firsts = torch.maximum(answers - 2, starts)
        begins = starts if self.prompts else firsts
        each = [torch.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
        rows = torch.cat(each) if each else begins
        document = torch.repeat_interleave(torch.arange(len(begins)), ends - begins)
        answer = rows >= firsts[document]
        count = -(-len(rows) // length)
        cut = torch.arange(count)[:, None] * length + torch.arange(length + unroll + 1)
        inside = cut < len(rows)
        cut = cut.clamp(max=len(rows) - 1)
        drafted = (answer[cut] & inside)[:, :length]
        kept = drafted.any(-1)
        return _Plan(file, rows[cut][kept], document[cut].masked_fill(~inside, NO_DOCUMENT)[kept], drafted[kept])


def cutoff_of_shards(folder: Path) -> int:
    """The hash below which a folder of teacher data holds out prompts. Raises ValueError where it has no shard."""
    file = next(iter(sorted(folder.glob(SHARDS))), None)
    if file is None:
        raise ValueError(f"no {SHARDS} in {folder}; write some with redraft distill")
    return int(_metadata(file).get("held_out_below", USUAL_CUTOFF))


def _check_overlap(metadata: Mapping[Path, Mapping[str, str]]) -> None:
    """Raises ValueError where two folders may hold the same prompts, drawn with the same seed or with the file's own
    responses: where they are of different runs, or copies of one. The ranks of a run, whatever folders they write,
    share out the prompts and the numbers of shards."""
    runs: dict[tuple[str | None, ...], tuple[str, Path]] = {}
    shards: dict[tuple[str | None, ...], Path] = {}
    for file, values in metadata.items():
        if "seed" not in values:  # written before it was stored
            continue
        folder, seed = file.parent, "" if values["source"] == "prefill" else values["seed"]
        drawn = (seed, *(values.get(name) for name in ("held_out", "source", "prompts", "shares", "self_written")))
        run, first = values.get("run"), folder
        if run:  # runs had no names before
            first_run, first = runs.setdefault(drawn, (run, folder))
        if not run or run == first_run:
            first = shards.setdefault((*drawn, file.name), folder)
        if first != folder:
            same = f" with the same seed {seed}: leave it out, or write it with another --seed" if seed else ""
            raise ValueError(f"{folder} holds prompts that {first} holds{same or ': leave it out'}")


def prompts_of(file: Path, before: int = 0, after: int = 0) -> Iterator[tuple[int, ...]]:
    """What stands before the answer of each document of a shard, as token ids, without the first `before` and the last
    `after`."""
    starts, answers, _ = _documents(file)
    with safe_open(file, framework="pt") as shard:
        tokens = shard.get_tensor("tokens")
    for start, answer in zip(starts.tolist(), answers.tolist(), strict=True):
        yield tuple(tokens[start + before : answer - after].tolist())


def prompt_hashes(file: Path) -> list[int]:
    """What tells the prompt of each document of a shard from others: see `prompt_hash`."""
    with safe_open(file, framework="pt") as shard:
        if PROMPTS in shard.keys():  # noqa: SIM118
            return [int(prompt) for prompt in shard.get_tensor(PROMPTS)]
    return list(map(prompt_hash, prompts_of(file)))


def most_frequent(counts: Tensor, kept: int) -> Tensor:
    """The `kept` most frequent tokens, most frequent first; among equals the lower id, int64 [kept]."""
    return counts.sort(descending=True, stable=True).indices[:kept]


def _metadata(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as shard:
        return shard.metadata() or {}


def _documents(file: Path) -> tuple[Tensor, Tensor, Tensor]:
    """First row, first answer row and end of each document of a shard, int64."""
    with safe_open(file, framework="pt") as shard:
        offsets, answers = shard.get_tensor("offsets").long(), shard.get_tensor("answer_starts").long()
    return offsets[:-1], answers, offsets[1:]
