"""Drawing tokens on the device that has the logits, by the kernel of kernel.cu; see README.md."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from redraft.plugins.cuda.declaration import Argument, Kernel
from redraft.plugins.cuda.launch import run

PART = 2048
"""Tokens of a block."""

RACE = Kernel(
    name="TokenRace",
    source=Path(__file__).resolve().parent / "kernel.cu",
    entry="token_race",
    attributes=(),
    inputs=(
        Argument("logits", "float32", ("rows", "vocabulary")),
        *(Argument(name, "float32", ("rows",)) for name in ("maxima", "inverse_temperatures")),
        Argument("keys", "int32", ("rows", "three")),
    ),
    scalars=("rows", "vocabulary"),
    outputs=(Argument("times", "float32", ("rows", "parts")), Argument("tokens", "int32", ("rows", "parts"))),
    grid=("parts", "rows", "one"),
    threads=128,
    derived={"parts": lambda sizes: (sizes["vocabulary"] + (PART - 1)) // PART, "one": lambda _: 1},
)


def race(logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
    """Tokens int32 [D] drawn from logits float32 [D, V], -inf where filtered out, at inverse temperatures float32 [D].

    keys int32 [D, 3]: low and high word of the seed, and the output position. Rows of one key share their noise, which
    is made once where they stand together. Where no token has a weight, as beside an infinite logit, the first of the
    largest logits is drawn.
    """
    maxima, most_likely = logits.max(dim=1)
    times, tokens = run(RACE, (logits, maxima, inverse_temperatures, keys), {})
    first, part = times.min(dim=1, keepdim=True)
    return torch.where(first.isinf(), most_likely[:, None].int(), tokens.gather(1, part))[:, 0]
