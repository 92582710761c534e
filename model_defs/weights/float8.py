"""What products in FP8 take of a quantized checkpoint as it is: the scales of E4M3 weights, and its floats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import weights_of
from redraft.model_defs.weights.blocks import row_orders
from redraft.model_defs.weights.folder import quantized_weights

MULTIPLIED = tuple(f"{name}.weight" for name in ("qkv", "attention_out", "gate_up", "up", "down", "lm_head"))
"""How our names of matrices end that products in FP8 take; those of experts, which end so too, are left in bfloat16"""


class RowScales(NamedTuple):
    """What becomes of a quantized checkpoint's matrices in FP8."""

    scales: Mapping[str, Tensor | None]
    """By our names, of the matrices that are stored so in the checkpoint: float32 [N]; None for floats"""
    rounded: Mapping[str, str]
    """How the others are quantized, by Hugging Face name; one that is not is fused with one that is"""
    floats: Mapping[str, str]
    """The weights that stay floats, by Hugging Face name"""


def row_scales(folder: Path, config: TargetConfig, ranks: int = 1) -> RowScales:
    """Those of a model folder; none where its weights are not quantized, and no scale where several ranks split the
    rows. A matrix that is read as floats has the same codes again when it is divided by its scales: rounding to
    bfloat16 moves a number by less than a sixteenth of what lies between two codes. What the checkpoint spares stays in
    floats: its maker chose what may lose digits. Raises FileNotFoundError, or ValueError for a damaged file."""
    scales: dict[str, Tensor | None] = {}
    rounded: dict[str, str] = {}
    floats: dict[str, str] = {}
    if (stored := quantized_weights(folder)) is None:
        return RowScales(scales, rounded, floats)
    for name, weight in weights_of(config).items():
        tied = name == "embedding.weight" and config.tie_embeddings
        if ".experts." in name or not (tied or name.endswith(MULTIPLIED)):
            continue
        names = [name, "lm_head.weight"] if tied else [name]  # a program may call it by either
        parts = [stored.row_scale(source) for source in weight.sources]
        found = [part for part in parts if part is not None]
        orders = row_orders(weight, [len(part) for part in found]) if len(found) == len(parts) else None
        if orders and len(orders) == 1 and ranks == 1:
            rows_of = torch.cat([found[i][torch.from_numpy(rows)] for i, rows in orders[0]])
            scales |= dict.fromkeys(names, rows_of)
            continue
        kinds = {source: stored.quantization(source) or "not quantized" for source in weight.sources}
        if any(map(stored.quantization, kinds)):
            rounded |= kinds
        else:
            scales |= dict.fromkeys(names)
            floats |= kinds
    return RowScales(scales, rounded, floats)
