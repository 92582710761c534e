"""Medusa's heads, as FasterDecoding publishes them.

Head i is named by its number: residual blocks `{i}.{j}.linear`, x + SiLU(W x + b), then a softmax layer
`{i}.{blocks}.weight` [V, H] of its own, all over the target's hidden states after its final norm. The tensors tell how
many there are: published configurations count otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from model_defs.drafters.hub.folder import HubFolder, Reader, Reading
from model_defs.drafters.medusa import MedusaConfig, MedusaDrafter
from model_defs.target.config import TargetConfig

BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
LAST = re.compile(r"(\d+)\.(\d+)\.weight")


def holds(folder: HubFolder) -> bool:
    return "medusa_num_heads" in folder.config or any(BLOCK.fullmatch(name) for name in folder.names)


def read(folder: HubFolder, target: TargetConfig, answers: Mapping[str, str]) -> Reading:
    tensors = folder.tensors()
    places = [tuple(map(int, match.groups())) for name in folder.names if (match := LAST.fullmatch(name))]
    if not places:
        raise ValueError(f"{folder.path} has no Medusa heads: expected tensors like 0.1.weight")
    heads, blocks = 1 + max(head for head, _ in places), max(place for _, place in places)
    weights = {}
    for head in range(heads):
        for block in range(blocks):
            for kind in ("weight", "bias"):
                weights[f"heads.{head}.blocks.{block}.linear.{kind}"] = tensors.take(f"{head}.{block}.linear.{kind}")
        weights[f"heads.{head}.own_head.weight"] = tensors.take(f"{head}.{blocks}.weight")
    tensors.require_all_taken(MEDUSA.form)
    vocabulary, size = weights["heads.0.own_head.weight"].shape
    return Reading(MedusaConfig(size, vocabulary, None, heads, blocks, "own"), weights)


MEDUSA = Reader("Medusa", MedusaDrafter.name, holds, read)
