"""A drafter's folder from the hub: its configuration and its tensors, and what reading it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_defs.files import StoredTensors, load_pickled, read_json, weight_files
from model_defs.target.config import TargetConfig

PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
"""Files of weights in torch's format, which are read where there is no safetensors file."""
PREFIXES = ("model.", "medusa_head.")
"""What some uploads put before every name."""


class HubFolder:
    """A folder with a `config.json`; weights are read when they are asked for."""

    def __init__(self, path: Path):
        """Raises FileNotFoundError or ValueError for its `config.json`."""
        self.path, self.config = path, read_json(path / "config.json")

    @cached_property
    def names(self) -> frozenset[str]:
        """The tensors' names, without prefixes; none where the folder holds no weights. Raises ValueError for a damaged
        file."""
        if file := self._pickled():
            return frozenset(without_prefix(load_pickled(file, "meta")))
        try:
            with StoredTensors.open(weight_files(self.path)) as stored:
                return frozenset(without_prefix(stored.shapes()))
        except FileNotFoundError:
            return frozenset()

    def tensors(self) -> HubTensors:
        """All tensors, as they are stored. Raises FileNotFoundError, or ValueError for a damaged file."""
        if file := self._pickled():
            return HubTensors(self.path, without_prefix(load_pickled(file)))
        with StoredTensors.open(weight_files(self.path)) as stored:
            return HubTensors(self.path, without_prefix({name: stored.read(name) for name in stored.shapes()}))

    def says(self, *names: str) -> Any:
        """The first of these fields of `config.json` that is there and not null; None without one."""
        return next((self.config[name] for name in names if self.config.get(name) is not None), None)

    def _pickled(self) -> Path | None:
        if any(self.path.glob("*.safetensors")):
            return None
        return next((self.path / name for name in PICKLED if (self.path / name).is_file()), None)


class HubTensors:
    """The tensors of a folder, of which a reader takes those that it knows."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]):
        self.path, self._left = path, tensors

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> Tensor:
        """A tensor, once: floats as float32. Raises KeyError with its name."""
        tensor = self._left.pop(name)
        return tensor.float() if tensor.is_floating_point() else tensor

    def take_if_there(self, name: str) -> Tensor | None:
        return self.take(name) if name in self else None

    def require_all_taken(self, form: str, ignored: Iterable[str] = ()) -> None:
        """Raise ValueError for tensors that nobody took: what a form does not have would be computed wrongly."""
        left = sorted(name for name in self._left if not name.endswith(("inv_freq", *ignored)))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise ValueError(f"{self.path} has tensors that {form} does not have: {', '.join(left[:3])}{more}")


@dataclass(frozen=True)
class Reading:
    """A drafter of ours that a folder's drafter is."""

    config: Any
    """The configuration of its kind"""
    weights: dict[str, Tensor]
    """float32, by our names"""
    hot_ids: Tensor | None = None
    """int64 [K], the target's ids of its head's rows; None: all"""
    embedding: Tensor | None = None
    """float32 [V, H], where the folder holds one"""


@dataclass(frozen=True)
class Reader:
    """What reads one form."""

    form: str
    """Its name, for messages and bundles."""
    kind: str
    """The draft model of `DRAFTERS` that it becomes."""
    holds: Callable[[HubFolder], bool]
    """Whether a folder is of this form."""
    read: Callable[[HubFolder, TargetConfig, Mapping[str, str]], Reading]
    """Reads a folder for a target, with the answers of --read-as. Raises ValueError, UnsupportedModelError, or KeyError
    (a missing field or weight)."""
    questions: tuple[str, ...] = field(default=())
    """What --read-as may answer."""


def without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by names without one of PREFIXES, where all have it."""
    for prefix in PREFIXES:
        if tensors and all(name.startswith((prefix, "lm_head.", "d2t", "t2d")) for name in tensors):
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return dict(tensors)


def llama_layer(tensors: HubTensors, source: str, ours: str, head_norms: bool = False) -> dict[str, Tensor]:
    """A layer's weights by the names of our layers, but for the norms before attention; `head_norms` are Qwen3's."""
    found = {
        f"{ours}.attention_out.weight": tensors.take(f"{source}.self_attn.o_proj.weight"),
        f"{ours}.down.weight": tensors.take(f"{source}.mlp.down_proj.weight"),
        f"{ours}.mlp_norm.weight": tensors.take(f"{source}.post_attention_layernorm.weight"),
        f"{ours}.gate_up.weight": torch.cat([tensors.take(f"{source}.mlp.{p}_proj.weight") for p in ("gate", "up")]),
    }
    for kind in ("weight", "bias"):
        if f"{source}.self_attn.q_proj.{kind}" in tensors or kind == "weight":
            found[f"{ours}.qkv.{kind}"] = torch.cat(
                [tensors.take(f"{source}.self_attn.{p}_proj.{kind}") for p in "qkv"]
            )
    for norm in ("q_norm", "k_norm") if head_norms else ():
        found[f"{ours}.{norm}.weight"] = tensors.take(f"{source}.self_attn.{norm}.weight")
    return found
