"""Medusa's heads, as FasterDecoding publishes them.

Head i is named by its number: residual blocks `{i}.{j}.linear`, x + SiLU(W x + b), then a softmax layer
`{i}.{blocks}.weight` [V, H] of its own, all over the target's hidden states after its final norm. The tensors tell how
many there are: published configurations count otherwise. Names begin with `medusa_head.` where the target's weights are
in the folder too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from redraft.model_defs.drafters.hub.folder import HubFolder, Reader, Reading
from redraft.model_defs.drafters.medusa import MedusaConfig, MedusaDrafter
from redraft.model_defs.target.config import TargetConfig

BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
LAST = re.compile(r"(\d+)\.(\d+)\.weight")
BESIDE_TARGET = "medusa_head."


def holds(folder: HubFolder) -> bool:
    return "medusa_num_heads" in folder.config or any(BLOCK.fullmatch(name) for name in head_names(folder))


def read(folder: HubFolder, target: TargetConfig, answers: Mapping[str, str]) -> Reading:
    names = head_names(folder)
    if names != folder.names:  # config.json and the other files are the target's
        folder.config = folder.config.fresh(folder.config.names())
    tensors = folder.tensors("" if names == folder.names else BESIDE_TARGET)
    indices = [tuple(map(int, match.groups())) for name in names if (match := LAST.fullmatch(name))]
    if not indices:
        raise ValueError(f"{folder.path} has no Medusa heads: expected tensors like 0.1.weight")
    heads, blocks = 1 + max(head for head, _ in indices), max(block_index for _, block_index in indices)
    weights = {}
    for head in range(heads):
        for block in range(blocks):
            for kind in ("weight", "bias"):
                weights[f"heads.{head}.blocks.{block}.linear.{kind}"] = tensors.take(f"{head}.{block}.linear.{kind}")
        weights[f"heads.{head}.own_head.weight"] = tensors.take(f"{head}.{blocks}.weight")
    tensors.require_all_taken(MEDUSA.form)
    vocabulary, size = weights["heads.0.own_head.weight"].shape
    for name, size_of_weights in (
        ("hidden_size", size),
        ("vocab_size", vocabulary),
        ("truncated_vocab_size", vocabulary),
    ):
        if (said := folder.config.get(name)) not in (None, size_of_weights):
            raise ValueError(f"{folder.path}: config.json says {name} {said!r}, and the heads have {size_of_weights}")
    folder.config.get("model_type")  # says nothing: heads have no layers of a model
    folder.config.get("num_hidden_layers")  # published configurations count otherwise
    return Reading(MedusaConfig(size, vocabulary, None, heads, blocks, "own"), weights)


def head_names(folder: HubFolder) -> frozenset[str]:
    """The names of the heads' tensors; all of the folder's where the target's weights are not there too."""
    inside = (name.removeprefix(BESIDE_TARGET) for name in folder.names if name.startswith(BESIDE_TARGET))
    return frozenset(inside) or folder.names


MEDUSA = Reader("Medusa", MedusaDrafter.name, holds, read)
