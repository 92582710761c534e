#!/usr/bin/env python
"""Train a recurrent drafter on teacher data (ReDrafter, section 3.5, equation 2).

At each position the drafter is unrolled T steps along the teacher's text, and each step is scored
against the teacher: its distribution over the hot vocabulary (soft labels) or the text itself (hard).
Only the drafter is trained. The run is cut into checkpoints; started again with the same output folder
it goes on from the last one.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from model_defs.fingerprint import target_fingerprint
from model_defs.recurrent import RecurrentConfig, RecurrentDrafter
from model_defs.target import Target

LOGIT_ROWS = 256
SOFT_LABELS = 32
DEPTH_DECAY = 0.85
DEPTH_SHARES = (1.0, 0.5, 0.5, 0.25)
"""Share of a batch's windows that is drafted to each depth; the last holds for all that are deeper."""
EVALUATION_WINDOWS = 128


class Labels(StrEnum):
    soft = "soft"
    hard = "hard"


class InitialState(StrEnum):
    embedding = "embedding"
    zero = "zero"


class TeacherData:
    """Shards of a teacher-data folder as windows of consecutive positions."""

    def __init__(self, folders: list[Path], held_out: int):
        """The first `held_out` shards of the first folder are kept for evaluation."""
        files = [sorted(folder.glob("shard-*.safetensors")) for folder in folders]
        missing = [str(folder) for folder, found in zip(folders, files, strict=True) if not found]
        if missing:
            raise typer.BadParameter(f"no shard-*.safetensors in {missing}; write some with build/distill.py")
        self.evaluation = files[0][:held_out]
        self.training = [file for found in files for file in found if file not in self.evaluation]
        if not self.training:
            raise typer.BadParameter(f"{folders[0]} holds only the {held_out} held-out shards")

    def count_tokens(self, vocab_size: int) -> Tensor:
        """How often the answers hold each token: int64 [V]."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for file in self.training:
            with safe_open(file, framework="pt") as shard:
                tokens, offsets = shard.get_tensor("tokens").long(), shard.get_tensor("offsets")
                starts = shard.get_tensor("answer_starts")
            for start, end in zip(starts.tolist(), offsets[1:].tolist(), strict=True):
                counts += torch.bincount(tokens[start:end], minlength=vocab_size)
        return counts

    @staticmethod
    def windows(file: Path, length: int, unroll: int) -> tuple[Tensor, Tensor]:
        """Tokens int64 [W, length + unroll + 1] and hidden [W, same, H] of a shard's answers. Position i < length
        is drafted from hidden[i]; windows are cut so that all of a window lies in one document."""
        with safe_open(file, framework="pt") as shard:
            data = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        span = length + unroll + 1
        firsts = [
            first
            for start, end in zip(data["answer_starts"].tolist(), data["offsets"][1:].tolist(), strict=True)
            for first in range(max(start - 2, 0), end - span, length)
        ]
        index = torch.tensor(firsts, dtype=torch.long)[:, None] + torch.arange(span)
        return data["tokens"].long()[index], data["hidden"][index]

    def batches(self, size: int, length: int, unroll: int, seed: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless shuffled batches of `size` windows; the first `skip` are passed over (resuming)."""
        generator = torch.Generator().manual_seed(seed)
        per_load = 4
        smallest = len(self.windows(self.training[0], length, unroll)[0])
        if smallest < size:
            raise typer.BadParameter(
                f"a shard holds {smallest} windows of {length} positions, fewer than a batch of {size}"
            )
        while True:
            order = torch.randperm(len(self.training), generator=generator).tolist()
            for i in range(0, len(order), per_load):
                loaded = [self.windows(self.training[j], length, unroll) for j in order[i : i + per_load]]
                tokens, hidden = (torch.cat(part) for part in zip(*loaded, strict=True))
                shuffled = torch.randperm(len(tokens), generator=generator)
                for rows in shuffled.split(size):
                    if len(rows) == size and (skip := skip - 1) < 0:
                        yield tokens[rows], hidden[rows]


class HeadLoss(torch.autograd.Function):
    """Cross-entropy of softmax(x W^T) against the teacher's likeliest tokens, with the gradient in x found in
    the same pass, so that only one block of logits exists at a time."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, rows: Tensor, mass: Tensor) -> Tensor:
        """x [N, H], weight [K, H], rows int64 [N, M] of the head and their label mass [N, M]."""
        gradient, total = torch.empty_like(x), x.new_zeros((), dtype=torch.float32)
        for part in (slice(i, i + LOGIT_ROWS) for i in range(0, len(x), LOGIT_ROWS)):
            p = torch.softmax(F.linear(x[part], weight), dim=-1)
            total -= (p.gather(1, rows[part]).float().clamp(min=1e-12).log() * mass[part]).sum()
            p *= mass[part].sum(-1, keepdim=True).to(p.dtype)
            gradient[part] = p.scatter_add_(1, rows[part], -mass[part].to(p.dtype)) @ weight
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None


class Trainer:
    def __init__(self, target: Target, drafter: RecurrentDrafter, labels: Labels, unroll: int, length: int):
        self.target, self.drafter = target, drafter
        self.labels, self.unroll, self.length = labels, unroll, length
        device = target.embedding.weight.device
        self.row_of = torch.full((target.config.vocab_size,), -1, dtype=torch.long, device=device)
        self.row_of[drafter.hot_ids] = torch.arange(len(drafter.hot_ids), device=device)
        self.weight = drafter.head_rows.to(torch.bfloat16)

    def teacher(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the teacher says follows each position but the first, as head rows int64 [W, span - 1, M] and their
        label mass f32. Soft: its M likeliest hot tokens. Hard: the text's own next token (mass 0 where not hot)."""
        if self.labels is Labels.hard:
            rows = self.row_of[F.pad(tokens[:, 2:], (0, 1))][..., None]
            return rows.clamp(min=0), (rows >= 0).float()
        parts = []
        for h in hidden[:, 1:].flatten(0, 1).split(LOGIT_ROWS):
            logits = F.linear(h, self.weight)
            values, rows = logits.topk(SOFT_LABELS, dim=-1)
            parts.append((rows, (values.float() - logits.float().logsumexp(-1, keepdim=True)).exp()))
        shape = (*hidden[:, 1:].shape[:2], SOFT_LABELS)
        rows, mass = (torch.cat(part).view(shape) for part in zip(*parts, strict=True))
        return rows, mass

    def steps(self, tokens: Tensor, hidden: Tensor, windows: Sequence[int]) -> Iterator[Tensor]:
        """Features [windows[d], length, H] of the drafting steps d = 0..T-1 along the text; `windows` do not grow."""
        context = self.drafter.context(hidden[:, : self.length])
        state = self.drafter.first_state(tokens[:, 1 : 1 + self.length])
        for depth, kept in enumerate(windows):
            if depth:
                here = slice(1 + depth, 1 + depth + self.length)
                state = self.drafter.next_state(state[:kept], tokens[:kept, here])
            yield self.drafter.features(state, context[:kept])

    def loss(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Mean over positions of the depth-weighted distillation loss; deep steps are estimated on fewer windows."""
        with torch.no_grad():
            rows, mass = self.teacher(tokens, hidden)
        total = torch.zeros((), device=hidden.device)
        shares = [DEPTH_SHARES[min(depth, len(DEPTH_SHARES) - 1)] for depth in range(self.unroll)]
        windows = [max(1, round(share * len(tokens))) for share in shares]
        with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
            features = list(self.steps(tokens, hidden, windows))
        for depth, (x, kept) in enumerate(zip(features, windows, strict=True)):
            here = slice(depth, depth + self.length)
            scaled = mass[:kept, here].flatten(0, 1) * (DEPTH_DECAY**depth / (kept * self.length))
            total = total + HeadLoss.apply(
                x.flatten(0, 1).to(torch.bfloat16), self.weight, rows[:kept, here].flatten(0, 1), scaled
            )
        return total

    @torch.no_grad()
    def evaluate(self, files: list[Path], device: torch.device) -> dict[str, object]:
        """Greedy acceptance on held-out text: per depth given the depth before, and tokens per step of a chain."""
        accepted, reached = torch.zeros(self.unroll), torch.zeros(self.unroll)
        head = self.target.lm_head.weight.to(torch.bfloat16)
        for file in files:
            tokens, hidden = TeacherData.windows(file, self.length, self.unroll)
            spread = torch.linspace(0, len(tokens) - 1, min(len(tokens), EVALUATION_WINDOWS)).long()
            for part in spread.split(16):
                t, h = tokens[part].to(device), hidden[part].to(device)
                truth = F.linear(h.flatten(0, 1), head).argmax(-1).view(t.shape)
                alive = torch.ones(len(part), self.length, dtype=torch.bool, device=device)
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    steps = list(self.steps(t, h, [len(part)] * self.unroll))
                for depth, x in enumerate(steps):
                    if depth:
                        alive = alive & (t[:, 1 + depth :][:, : self.length] == truth[:, depth:][:, : self.length])
                    drafted = self.drafter.hot_ids[F.linear(x.to(torch.bfloat16), self.weight).argmax(-1)]
                    reached[depth] += alive.sum().item()
                    alive = alive & (drafted == truth[:, 1 + depth :][:, : self.length])
                    accepted[depth] += alive.sum().item()
        conditional = accepted / reached.clamp(min=1)
        chain = 1 + conditional.cumprod(0).sum().item()
        return {
            "conditional_acceptance": [round(c, 4) for c in conditional.tolist()],
            "chain_acceptance_length": round(chain, 4),
        }


@torch.no_grad()
def initialize_by_ridge(trainer: Trainer, tokens: Tensor, hidden: Tensor, strength: float = 10.0) -> None:
    """Closed-form start: input and output layers map [embedding, h] to the next hidden state."""
    drafter, size = trainer.drafter, trainer.drafter.config.hidden_size
    e = drafter.embed(tokens[:, 1:-1]).float().flatten(0, 1)
    x = torch.cat([e, hidden[:, :-2].float().flatten(0, 1)], dim=-1)
    y = hidden[:, 1:-1].float().flatten(0, 1)
    gram = x.T @ x
    ridge = torch.linalg.solve(gram + strength * gram.diagonal().mean() * 1e-3 * torch.eye(2 * size), x.T @ y)
    u, s, vt = torch.linalg.svd(ridge.T, full_matrices=False)
    drafter.input.weight[:size] = s.sqrt()[:, None] * vt
    drafter.output.weight.zero_()
    drafter.output.weight[:, :size] = u * s.sqrt()
    drafter.input.bias.zero_()


def hot_ids(counts: Tensor, kept: int) -> Tensor:
    """The `kept` most frequent tokens, ascending; among equals the lower id, int64 [kept]."""
    ranked = counts.sort(descending=True, stable=True).indices[:kept]
    print(f"hot vocabulary: {kept} tokens cover {counts[ranked].sum() / counts.sum():.2%} of the answers")
    return ranked.sort().values


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 2% of the steps, then a cosine to zero."""
    warm = max(1, steps // 50)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def main(
    model: Annotated[Path, typer.Option(help="Target folder written by fetch_model.py.")],
    data: Annotated[list[Path], typer.Option(help="Teacher data written by distill.py; may be given several times.")],
    output: Annotated[Path, typer.Option(help="Folder for the drafter, its checkpoint and its log.")],
    start_from: Annotated[Path | None, typer.Option(help="A trained drafter to go on from; its shape is kept.")] = None,
    positions: Annotated[
        int, typer.Option(help="Positions to train on; the learning rate decays over them.")
    ] = 5_000_000,
    labels: Annotated[Labels, typer.Option(help="Teacher distributions, or the text itself.")] = Labels.soft,
    hot_vocabulary: Annotated[int, typer.Option(help="Head rows: the K most frequent tokens; 0 is all.")] = 12288,
    exit_dim: Annotated[int, typer.Option(help="Width of the residual blocks.")] = 1024,
    blocks: Annotated[int, typer.Option(help="Residual blocks.")] = 3,
    initial_state: Annotated[
        InitialState, typer.Option(help="s_1: `embedding` (paper) or `zero` (Apple's release).")
    ] = InitialState.embedding,
    unroll: Annotated[int, typer.Option(help="Drafting steps T in the loss.")] = 5,
    window: Annotated[int, typer.Option(help="Consecutive positions per training window.")] = 32,
    batch: Annotated[int, typer.Option(help="Windows per step.")] = 16,
    peak_rate: Annotated[float, typer.Option(help="Peak learning rate (Adam).")] = 1.5e-3,
    held_out: Annotated[int, typer.Option(help="Shards kept for evaluation.")] = 4,
    every: Annotated[int, typer.Option(help="Steps between evaluation and checkpoint.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the data order and the weights.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 is torch's default.")] = 0,
) -> None:
    """Train a recurrent drafter by distillation; resumes when the output folder has a checkpoint."""
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Target.from_folder(model).to(device)
    teacher = TeacherData(data, held_out)
    size = target.config.hidden_size
    output.mkdir(parents=True, exist_ok=True)
    checkpoint = output / "checkpoint.safetensors"
    if start_from or checkpoint.exists():
        drafter = RecurrentDrafter.load(output if checkpoint.exists() else start_from, target).train().to(device)  # type: ignore[arg-type]
    else:
        ids = hot_ids(teacher.count_tokens(target.config.vocab_size), hot_vocabulary or target.config.vocab_size)
        config = RecurrentConfig(
            size,
            target.config.vocab_size,
            exit_dim,
            blocks,
            initial_state.value,
            "target",
            hot_vocabulary or None,  # type: ignore[arg-type]
        )
        drafter = RecurrentDrafter(config, target, ids).to(device)
    trainer = Trainer(target, drafter, labels, unroll, window)
    card = {"target_fingerprint": target_fingerprint(target)}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    steps, step, log = positions // (window * batch), 0, output / "log.jsonl"
    if checkpoint.exists():
        step = _restore(checkpoint, drafter, optimizer)
        print(f"resumed at step {step} of {steps}")
    elif not start_from:
        tokens, hidden = teacher.windows(teacher.training[0], window, unroll)
        initialize_by_ridge(trainer, tokens.to(device), hidden.to(device))
    batches = teacher.batches(batch, window, unroll, seed, step)
    begun, first, losses = time.monotonic(), step, list[float]()
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("training", total=steps, completed=step)
        while step < steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak_rate)
            tokens, hidden = (part.to(device) for part in next(batches))
            loss = trainer.loss(tokens, hidden)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            step += 1
            losses.append(loss.item())
            rate = (step - first) * window * batch / (time.monotonic() - begun)
            progress.update(task, completed=step, description=f"{step}/{steps} {rate:.0f} positions/s")
            if step % every == 0 or step == steps:
                record: dict[str, object] = {
                    "step": step,
                    "positions": step * window * batch,
                    "loss": round(sum(losses) / len(losses), 4),
                    "rate": round(rate),
                }
                record |= trainer.evaluate(teacher.evaluation, device)
                record["minutes_left"] = round((steps - step) * window * batch / rate / 60, 1)
                losses.clear()
                with log.open("a") as file:
                    print(json.dumps(record), file=file)
                print(json.dumps(record), flush=True)
                _save(checkpoint, drafter, optimizer, step)
                drafter.save(output, card)


def _save(path: Path, drafter: RecurrentDrafter, optimizer: torch.optim.Optimizer, step: int) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in drafter.state_dict().items()}
    for name, parameter in drafter.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata={"step": str(step)})
    partial.replace(path)


def _restore(path: Path, drafter: RecurrentDrafter, optimizer: torch.optim.Optimizer) -> int:
    with safe_open(path, framework="pt") as file:
        step = int(file.metadata()["step"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    drafter.load_state_dict({name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model.")})
    for name, parameter in drafter.named_parameters():
        prefix = f"optimizer.{name}."
        optimizer.state[parameter] = {
            key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)
        }
    return step


if __name__ == "__main__":
    typer.run(main)
