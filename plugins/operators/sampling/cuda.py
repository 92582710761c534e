"""Drawing tokens on the device that has the logits, by the kernels of filter.cu and kernel.cu; see README.md."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from redraft.plugins.cuda.declaration import Argument, Kernel
from redraft.plugins.cuda.launch import run

PART = 2048
"""Tokens of a block."""
MOST_TOKENS = (1 << 22) - 1
"""Largest vocabulary: the sums of weights, in fixed point, fit 64 bits."""
FOLDER = Path(__file__).resolve().parent

FILTER = Kernel(
    name="TokenFilter",
    source=FOLDER / "filter.cu",
    entry="token_filter",
    attributes=(),
    inputs=(
        Argument("logits", "float32", ("rows", "vocabulary")),
        *(Argument(name, "float32", ("rows",)) for name in ("maxima", "inverse_temperatures")),
        Argument("filters", "int32", ("rows", "three")),
    ),
    scalars=("vocabulary",),
    outputs=(Argument("limits", "int32", ("rows", "four")),),
    grid=("rows", "one", "one"),
    threads=512,
    derived={"four": lambda _: 4, "one": lambda _: 1},
)
RACE = Kernel(
    name="TokenRace",
    source=FOLDER / "kernel.cu",
    entry="token_race",
    attributes=(),
    inputs=(
        Argument("logits", "float32", ("rows", "vocabulary")),
        *(Argument(name, "float32", ("rows",)) for name in ("maxima", "inverse_temperatures")),
        Argument("keys", "int32", ("rows", "three")),
        Argument("limits", "int32", ("rows", "four")),
    ),
    scalars=("rows", "vocabulary"),
    outputs=(Argument("times", "float32", ("rows", "parts")), Argument("tokens", "int32", ("rows", "parts"))),
    grid=("parts", "rows", "one"),
    threads=128,
    derived={"parts": lambda sizes: (sizes["vocabulary"] + (PART - 1)) // PART, "one": lambda _: 1},
)


def race(logits: Tensor, inverse_temperatures: Tensor, keys: Tensor, filters: Tensor | None = None) -> Tensor:
    """Tokens int32 [D] drawn from logits float32 [D, V] at inverse temperatures float32 [D].

    keys int32 [D, 3]: low and high word of the seed, and the output position. Rows of one key share their noise, which
    is made once where they stand together. filters int32 [D, 3]: top-k, 0 for all, and the two words of top-p as
    float64, low and high; None keeps all tokens. Where no token has a weight, as beside an infinite logit, the first of
    the largest logits is drawn. Raises ValueError for more than MOST_TOKENS.
    """
    if logits.shape[1] > MOST_TOKENS:
        raise ValueError(f"vocabulary {logits.shape[1]}: expected at most {MOST_TOKENS}; draw on the host")
    maxima, most_likely = logits.max(dim=1)
    inputs = (logits, maxima, inverse_temperatures)
    limits = keys.new_zeros(len(keys), 4) if filters is None else run(FILTER, (*inputs, filters), {})[0]
    times, tokens = run(RACE, (*inputs, keys, limits), {})
    first, part = times.min(dim=1, keepdim=True)
    return torch.where(first.isinf(), most_likely[:, None].int(), tokens.gather(1, part))[:, 0]
