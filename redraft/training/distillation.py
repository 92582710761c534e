"""Distillation of drafters: the loss, the judgement on held-out text, the learning rate, checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from redraft.model_defs.drafters.base import Decay, Drafter
from redraft.model_defs.drafters.windows import Windows
from redraft.model_defs.files import save_tensors
from redraft.model_defs.precision import working_dtype, working_precision
from redraft.model_defs.target.model import Target

LOGIT_ROWS = {"cpu": 512, "cuda": 8192}
"""Rows of logits that exist at a time, by device."""
SOFT_LABELS = 32
DEPTH_DECAY = 0.85
OTHER_ROWS = 1024
"""Rows of the head, besides the labels', that at least stand for all others in the loss of a block of logits."""
SHAPE = 128
"""Matrices that differ in size from step to step are filled up to a multiple of this: the CPU's library compiles a
kernel for every new size, which takes longer than most of the products."""
EVALUATED_POSITIONS = 1024
"""Positions that are evaluated at a time."""
SIBLINGS = 4
"""Most likely tokens after a text that a tree of the usual size may verify."""
WARM_UP = 0.02


class Labels(StrEnum):
    soft = "soft"
    hard = "hard"


def sample_head(labels: Tensor, size: int, others: int, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """A sample of a head's rows 0 … size - 1 that estimates its softmax: all labels, and `others` of the rest drawn
    alike, or so many more that S is a multiple of `multiple` or the whole head. Gives the sample int64 [S] in order,
    what to add to its logits float32 [S] (the log of how many rows each stands for), and the places of the labels in
    it, int64 of their shape."""
    is_label = torch.zeros(size, dtype=torch.bool, device=labels.device)
    is_label[labels.flatten()] = True
    rest = (~is_label).nonzero().squeeze(1)
    others += (len(rest) - size - others) % multiple
    drawn = rest[torch.randperm(len(rest), device=labels.device)[:others]]
    correction = torch.full((size,), -math.inf, device=labels.device)
    correction[drawn] = math.log(len(rest) / max(len(drawn), 1) or 1)
    correction[is_label] = 0
    sample = correction.isfinite().nonzero().squeeze(1)
    index = torch.zeros(size, dtype=torch.long, device=labels.device)
    index[sample] = torch.arange(len(sample), device=labels.device)
    return sample, correction[sample], index[labels]


def fill_up(x: Tensor) -> Tensor:
    """x [N, ...] with zeros after it, up to a multiple of SHAPE rows."""
    return F.pad(x, (0, 0, 0, -len(x) % SHAPE))


class HeadLoss(torch.autograd.Function):
    """Cross-entropy of softmax(x W^T + z U^T) against label masses, with the gradients found in the same pass, so that
    only one block of logits exists at a time. z U^T, where there is any, is token info of the first logits. Of rows
    that are nobody's label in a block, `OTHER_ROWS` stand for all (`sample_head`)."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, rows: Tensor, mass: Tensor, z: Tensor | None = None, up: Tensor | None = None
    ) -> Tensor:
        """x [N, H], weight [K, H], rows int64 [N, M] of the head, distinct for each x, and their label mass [N, M]; z
        [N, R], up [<= K, R]."""
        count = len(x)
        x, rows, mass = fill_up(x), fill_up(rows), fill_up(mass)
        gradients = [torch.empty_like(x)]
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if z is not None and up is not None:
            z = fill_up(z)
            gradients += [torch.empty_like(z), up.new_zeros(len(up) + 1, up.shape[1], dtype=torch.float32)]
            up = F.pad(up, (0, 0, 0, 1))  # what rows without token info take
        total = x.new_zeros((), dtype=torch.float32)
        rows_at_once = LOGIT_ROWS[x.device.type]
        for part in (slice(i, i + rows_at_once) for i in range(0, len(x), rows_at_once)):
            sample, correction, labels = sample_head(rows[part], len(weight), OTHER_ROWS, 4 * SHAPE)
            head = weight[sample]
            logits = F.linear(x[part], head, correction.to(x.dtype))
            if z is not None and up is not None:
                informed = sample.clamp(max=len(up) - 1)
                logits += F.linear(z[part], up[informed])
            p = torch.softmax(logits, dim=-1)
            total -= (p.gather(1, labels).float().clamp(min=1e-12).log() * mass[part]).sum()
            p *= mass[part].sum(-1, keepdim=True).to(p.dtype)
            p.scatter_add_(1, labels, -mass[part].to(p.dtype))
            gradients[0][part] = p @ head
            if of_weight is not None:
                of_weight.index_add_(0, sample, (p.T @ x[part]).float())
            if z is not None and up is not None:
                gradients[1][part] = p @ up[informed]
                gradients[2].index_add_(0, informed, (p.T @ z[part]).float())
        gradients[:2] = [gradient[:count] for gradient in gradients[:2]]
        gradients[2:] = [gradient[:-1] for gradient in gradients[2:]]
        ctx.save_for_backward(of_weight, *gradients)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = (None if part is None else part * grad.to(part.dtype) for part in ctx.saved_tensors)
        weight, x, *info = saved
        return x, weight, None, None, *(info or (None, None))


class Trainer:
    """The loss of a drafter that is unrolled `unroll` steps along the teacher's text, and its acceptance there."""

    def __init__(self, target: Target, drafter: Drafter, labels: Labels, unroll: int, hidden_weight: float):
        self.drafter, self.labels, self.unroll, self.hidden_weight = drafter, labels, unroll, hidden_weight
        self.device = target.embedding.weight.device
        self.row_of = torch.full((target.config.vocab_size,), -1, dtype=torch.long, device=self.device)
        self.row_of[drafter.hot_ids] = torch.arange(len(drafter.hot_ids), device=self.device)
        self.dtype = working_dtype(self.device)
        self.target_head = target.lm_head.weight.to(self.dtype)
        self.rows = drafter.head_rows.to(self.dtype)

    @property
    def head(self) -> Tensor:
        """The weight [K, H] of the drafter's head: the target's rows, or its own, which is trained."""
        weight = self.drafter.head_weight
        return self.rows if weight is self.drafter.head_rows else weight.to(self.dtype)

    def teacher(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of rows of hidden states [N, H]: head rows int64 [N, M] and their mass float32. Soft: the teacher's M
        most likely hot tokens. Hard: the text's own next tokens int64 [N] (mass 0 where not hot)."""
        if self.labels is Labels.hard:
            rows = self.row_of[tokens][:, None]
            return rows.clamp(min=0), (rows >= 0).float()
        count = min(SOFT_LABELS, len(self.rows))
        blocks = fill_up(hidden.to(self.dtype)).split(LOGIT_ROWS[hidden.device.type])
        most_likely = [torch.softmax(F.linear(h, self.rows), dim=-1).topk(count, dim=-1) for h in blocks]
        mass, rows = (torch.cat(part)[: len(hidden)] for part in zip(*most_likely, strict=True))
        return rows, mass.float()

    def counts(self, windows: Windows) -> list[int]:
        """Positions that the loss is the mean over, at each depth."""
        kept = self._kept(windows.positions.shape[1])
        return [int(windows.scored(here, depth).sum()) for depth, here in enumerate(kept)]

    def loss(self, windows: Windows, counts: Sequence[int] | None = None) -> Tensor:
        """Over all depths, each weighted by DEPTH_DECAY: the mean over positions of cross-entropy and, times the hidden
        weight, squared error of the predicted hidden states. Deep steps are estimated on fewer positions. Where the
        windows are a piece of a batch, `counts` are the whole batch's, and the pieces' losses add up to its loss."""
        kept = self._kept(windows.positions.shape[1])
        predicted = self._predicted(windows, kept)
        scored = [windows.scored(here, depth) for depth, here in enumerate(kept)]
        x = torch.cat([part[mask.flatten()] for part, mask in zip(predicted, scored, strict=True)])
        at = torch.cat([windows.flat(mask.shape[1], depth + 1)[mask] for depth, mask in enumerate(scored)])
        own = [int(mask.sum()) for mask in scored]
        whole = own if counts is None else counts
        scales = [torch.full((n,), DEPTH_DECAY**d / max(whole[d], 1)) for d, n in enumerate(own)]
        scale = torch.cat(scales).to(self.device)
        tokens, hidden = windows.tokens.flatten(), windows.hidden.flatten(0, 1)
        labels = self._scaled_labels(at, tokens, hidden, scale)
        total = HeadLoss.apply(x.to(self.dtype), self.head, *labels, *self._info(tokens[at]))
        if self.hidden_weight:
            error = (x.float() - hidden[at].float()).square().mean(-1)
            total = total + self.hidden_weight * (error * scale).sum()
        return total

    def _predicted(self, windows: Windows, kept: list[int]) -> list[Tensor]:
        layers = None if windows.layers is None else windows.layers.to(self.dtype)
        windows = replace(windows, hidden=windows.hidden.to(self.dtype), layers=layers)
        with working_precision(self.device):
            return list(self.drafter.unroll(windows, kept))

    def _kept(self, positions: int) -> list[int]:
        shares = self.drafter.recipe.depth_shares
        here = (shares[min(depth, len(shares) - 1)] for depth in range(self.unroll))
        return [max(1, round(share * positions)) if share else 0 for share in here]

    @torch.no_grad()
    def _scaled_labels(self, at: Tensor, tokens: Tensor, hidden: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of rows `at`, which may repeat, their mass scaled."""
        distinct, label_of = at.unique(return_inverse=True)
        rows, mass = self.teacher(tokens[distinct + 1], hidden[distinct])
        return rows[label_of], mass[label_of] * scale[:, None]

    def _info(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """The factors of the token info of tokens [N], if the drafter has any: z [N, R] and U [<= K, R], in the
        working dtype."""
        if self.drafter.token_info is None:
            return ()
        with working_precision(self.device):
            z, up = self.drafter.token_info.factors(tokens)
        return z.to(self.dtype), up.to(self.dtype)

    @torch.no_grad()
    def evaluate(self, held_out: Iterable[Windows]) -> dict[str, Any]:
        """Greedy acceptance on held-out text: per depth given the depth before, tokens per step of a chain (the bonus
        token included), and how often one of the SIBLINGS most likely tokens is right, over the chance that the
        drafter gives it: trees verify more than a chain."""
        accepted, reached = torch.zeros(self.unroll), torch.zeros(self.unroll)
        among, promised = 0, 0.0
        for windows in held_out:
            size = max(1, EVALUATED_POSITIONS // windows.positions.shape[1])
            for first in range(0, len(windows), size):
                judged = self._accepted(windows[first : first + size].to(self.device))
                for depth, (before, after, siblings, chances) in enumerate(judged):
                    reached[depth] += before
                    accepted[depth] += after
                    among += siblings
                    promised += chances
        conditional = accepted / reached.clamp(min=1)
        return {
            "conditional_acceptance": [round(c, 4) for c in conditional.tolist()],
            "chain_acceptance_length": round(1 + conditional.cumprod(0).sum().item(), 4),
            "acceptance_ratio": round(among / max(promised, 1.0), 4),
        }

    @torch.no_grad()
    def accepted(self, windows: Windows) -> tuple[int, int]:
        """How many drafts begin in windows, and how many tokens of them are accepted greedily."""
        judged = list(self._accepted(windows.to(self.device)))
        return judged[0][0], sum(after for _, after, *_ in judged)

    def _accepted(self, windows: Windows) -> Iterator[tuple[int, int, int, float]]:
        """Per depth, how many drafts along the text get there, how many of those are right there, and have the right
        token among their SIBLINGS most likely ones, and the sum of these tokens' chances. A draft gets to a depth where
        all before it was right and the text goes on as the target would greedily."""
        most = windows.positions.shape[1]
        tokens = windows.tokens.flatten()
        alive = windows.drafted
        predicted = self._predicted(windows, [most] * self.unroll)
        hidden = self._logits(windows.hidden.flatten(0, 1), self.target_head)
        truth = torch.cat([logits.argmax(-1) for logits in hidden])
        for depth, x in enumerate(predicted):
            at = windows.flat(most, depth + 1)
            alive = alive & windows.scored(most, depth)
            if depth:
                alive = alive & (tokens[at] == truth[at - 1])
            before, at = alive, at[alive]
            siblings = min(SIBLINGS, len(self.head))
            drafted = self._logits(x[alive.flatten()], self.head, tokens[at])
            best = [(logits.argmax(-1), *logits.float().softmax(-1).topk(siblings)) for logits in drafted]
            first, chances, among = map(torch.cat, zip(*best, strict=True))
            alive = alive.clone()
            alive[before] = self.drafter.hot_ids[first] == truth[at]
            right = self.drafter.hot_ids[among] == truth[at, None]
            yield int(before.sum()), int(alive.sum()), int(right.sum()), float(chances.sum())

    def _logits(self, x: Tensor, weight: Tensor, tokens: Tensor | None = None) -> Iterator[Tensor]:
        """A head's logits for hidden states [N, H], with the token info of `tokens` [N], some rows at a time; of none
        where there are none."""
        rows = LOGIT_ROWS[x.device.type]
        for i in range(0, max(len(x), 1), rows):
            logits = F.linear(x[i : i + rows].to(self.dtype), weight)
            if tokens is not None and (info := self._info(tokens[i : i + rows])):
                z, up = info
                logits[:, : len(up)] += F.linear(z, up)
            yield logits


def learning_rate(progress: float, peak: float, decay: Decay) -> float:
    """Linear warm-up over the first WARM_UP of the run, then a cosine or a line to zero; progress from 0 to 1."""
    if progress < WARM_UP:
        return peak * progress / WARM_UP
    left = max(0.0, (1 - progress) / (1 - WARM_UP))
    return peak * (left if decay is Decay.linear else 0.5 * (1 - math.cos(math.pi * left)))


def make_optimizer(drafter: Drafter, peak_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(drafter.parameters(), lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)


@dataclass
class RunState:
    """How far a run is, and the sum of its losses since the last line of its log."""

    step: int = 0
    positions: int = 0
    seconds: float = 0.0
    losses: int = 0
    loss: float = 0.0


def save_checkpoint(
    path: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, state: RunState, recipe: dict[str, str]
) -> None:
    """Write what a run goes on from; `recipe` is what it must be given again."""
    tensors = {f"model.{name}": tensor for name, tensor in drafter.state_dict().items()}
    for name, parameter in drafter.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    metadata = {name: str(value) for name, value in asdict(state).items()} | {"recipe": json.dumps(recipe)}
    save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from."""

    state: RunState
    tensors: dict[str, Tensor]
    """The drafter's, named `model.NAME`, and the optimizer's, `optimizer.PARAMETER.NAME`"""

    @classmethod
    def read(cls, path: Path, recipe: dict[str, str]) -> Checkpoint:
        """Read a file. Raises ValueError where its run was begun with another recipe."""
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            begun = json.loads(metadata["recipe"])
            if others := [name for name in begun if begun[name] != recipe.get(name)]:
                was, asked = (
                    ", ".join(f"{name} {settings.get(name)}" for name in others) for settings in (begun, recipe)
                )
                raise ValueError(
                    f"{path} is of a run with {was}, the command asks for {asked}; for these give another --output "
                    f"and --start-from {path.parent}"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state = RunState(
            int(metadata["step"]),
            int(metadata["positions"]),
            float(metadata["seconds"]),
            int(metadata.get("losses", 0)),
            float(metadata.get("loss", 0)),
        )
        return cls(state, tensors)

    def restore(self, drafter: Drafter, optimizer: torch.optim.Optimizer) -> None:
        """Give a drafter its weights and an optimizer its state."""
        weights = {name[6:]: tensor for name, tensor in self.tensors.items() if name.startswith("model.")}
        drafter.load_state_dict(weights)
        for name, parameter in drafter.named_parameters():
            prefix = f"optimizer.{name}."
            optimizer.state[parameter] = {
                key[len(prefix) :]: value.to(parameter.device)
                for key, value in self.tensors.items()
                if key.startswith(prefix)
            }
