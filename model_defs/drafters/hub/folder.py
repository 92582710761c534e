"""A drafter's folder from the hub: its configuration and its tensors, and what reading it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.model_defs.drafters.hub.fields import Fields
from redraft.model_defs.drafters.layer_shape import LayerShape
from redraft.model_defs.files import (
    FLOATS,
    INDEX,
    PICKLED,
    StoredTensors,
    load_pickled,
    pickled_files,
    read_json,
    require_finite,
    weight_files,
)
from redraft.model_defs.target.config import TargetConfig

MEDUSA_FILE = "medusa_lm_head.pt"
"""What Medusa calls its weights in torch's format."""
PREFIXES = ("model.", "medusa_head.")
"""What some uploads put before every name."""
IDS = ("d2t", "t2d")
"""Tensors that are no weights."""


class HubFolder:
    """A folder with a `config.json`; weights are read when they are asked for."""

    def __init__(self, path: Path):
        """Raises FileNotFoundError or ValueError for its `config.json`."""
        if path.suffix == ".gguf" and path.is_file():
            raise ValueError(
                f"{path} is a GGUF file, of which no drafter is read: give the folder that it was converted from; a "
                f"whole model drafts from the folder that `redraft fetch {path}` makes"
            )
        file = path / "config.json"
        self.path, self.config = path, Fields(read_json(file), file)
        self.files_read: set[str] = set()
        """The names of the files of its weights, and of what is read beside them"""

    @cached_property
    def names(self) -> frozenset[str]:
        """The tensors' names, without a prefix that all have. Raises FileNotFoundError where weights are missing, or
        ValueError for a damaged file."""
        return frozenset(without_prefix(self._stored("meta")))

    def tensors(self, prefix: str = "") -> HubTensors:
        """The tensors whose names begin with `prefix`, as they are stored, without a prefix that all of these have.
        Raises as `names`."""
        return HubTensors(self.path, without_prefix(self._stored("cpu", prefix)))

    def says(self, name: str, *parts: str) -> Any:
        """A field of `config.json`, or of these objects in it, that is not null; None without one. Raises ValueError
        where they contradict each other."""
        sections = (self.config, *map(self.config.part, parts))
        values = {f"{section.prefix}{name}": value for section in sections if (value := section.get(name)) is not None}
        if any(value != next(iter(values.values())) for value in values.values()):
            says = " and ".join(f"{whole} {value!r}" for whole, value in values.items())
            raise ValueError(
                f"{self.path}: config.json says {says}, which contradict each other: give --read-as ignore= and the "
                "wrong one"
            )
        return next(iter(values.values()), None)

    def hidden_size(self, layer: Mapping[str, Any], target: TargetConfig) -> int:
        """The layers' hidden size. Raises ValueError where it is not the target's, or that of the target it names."""
        size, of_target = layer["hidden_size"], self.says("target_hidden_size")
        if size != (of_target or size) or size != target.hidden_size:
            raise ValueError(
                f"{self.path}: the drafter has hidden size {size} and is for a target of {of_target or size}; this one "
                f"has {target.hidden_size}, and both must be the same"
            )
        return size

    def names_architecture(self, part: str) -> bool:
        """Whether the name of an architecture in `config.json` has this part."""
        names = self.config.get("architectures")
        return isinstance(names, list) and any(part in str(name) for name in names)

    def _stored(self, device: str, prefix: str = "") -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`; on "meta" their shapes, for which no weight is read."""
        files = self._files()
        self.files_read |= {file.name for file in files}
        if files[0].suffix != ".safetensors":
            loaded = {name: tensor for file in files for name, tensor in load_pickled(file, device).items()}
            return {name: tensor for name, tensor in loaded.items() if name.startswith(prefix)}
        with StoredTensors.open(files) as stored:
            shapes = {name: shape for name, shape in stored.shapes().items() if name.startswith(prefix)}
            return shapes if device == "meta" else {name: stored.read(name) for name in shapes}

    def _files(self) -> list[Path]:
        """Its files of weights: those in torch's format where there is no safetensors file. Raises FileNotFoundError
        where one is missing, or all are."""
        if any(self.path.glob("*.safetensors")) or (self.path / INDEX).exists():
            return weight_files(self.path)
        if files := pickled_files(self.path):
            return files
        if (self.path / MEDUSA_FILE).exists():
            return [self.path / MEDUSA_FILE]
        raise FileNotFoundError(f"{self.path}: no .safetensors file, {PICKLED} or {MEDUSA_FILE}")


class HubTensors:
    """The tensors of a folder, of which a reader takes those that it knows."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]):
        self.path, self._left = path, tensors

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> Tensor:
        """A tensor, once: weights as float32, those of IDS as they are. Raises ValueError where it is missing, or for
        a quantized weight, or one that is not finite."""
        if name not in self._left:
            raise ValueError(f"{self.path}: the tensor {name} is missing, which this form has")
        tensor = self._left.pop(name)
        if name in IDS:
            return tensor
        if tensor.dtype not in FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(
                f"{self.path}: {name} is stored in {kind}, and quantized drafters are not read: expected float64, "
                "float32, float16 or bfloat16"
            )
        require_finite(tensor, name, self.path)
        return tensor.float()

    __getitem__ = take

    def take_if_there(self, name: str) -> Tensor | None:
        return self.take(name) if name in self else None

    def peek(self, name: str) -> Tensor:
        """A tensor that is taken again."""
        tensor = self._left[name]
        self.take(name)
        self._left[name] = tensor
        return tensor.float()

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
    mask_embedding: Tensor | None = None
    """float32 [H], what stands in the embedding for the configuration's mask, where the folder holds it apart"""
    head: Tensor | None = None
    """float32 [V, H], what the folder holds as a copy of the target's head; None where it holds none"""


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
    """Reads a folder for a target, with the answers of --read-as. Raises ValueError or UnsupportedModelError."""
    questions: tuple[str, ...] = field(default=())
    """What --read-as may answer."""


def refuse_scaled_embeddings(folder: HubFolder, target: TargetConfig) -> None:
    """Raise ValueError for a target whose embeddings are scaled, where it decides what a drafter of this form reads."""
    if target.embedding_scale != 1.0:
        raise ValueError(f"{folder.path}: the target scales its embeddings, and the form does not say if drafters do")


def without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by names without one of PREFIXES, where all have it."""
    for prefix in PREFIXES:
        if tensors and all(name.startswith((prefix, "lm_head.", "d2t", "t2d")) for name in tensors):
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return dict(tensors)


def llama_layer(tensors: HubTensors, source: str, ours: str, head_norms: bool = False) -> dict[str, Tensor]:
    """A layer's weights by the names of our layers, but for the norms before attention; `head_norms` are Qwen3's.
    Raises ValueError for a bias after attention that is not 0."""
    weights = {
        f"{ours}.attention_out.weight": tensors.take(f"{source}.self_attn.o_proj.weight"),
        f"{ours}.down.weight": tensors.take(f"{source}.mlp.down_proj.weight"),
        f"{ours}.mlp_norm.weight": tensors.take(f"{source}.post_attention_layernorm.weight"),
        f"{ours}.gate_up.weight": torch.cat([tensors.take(f"{source}.mlp.{p}_proj.weight") for p in ("gate", "up")]),
    }
    for kind in ("weight", "bias"):
        if f"{source}.self_attn.q_proj.{kind}" in tensors or kind == "weight":
            weights[f"{ours}.qkv.{kind}"] = torch.cat(
                [tensors.take(f"{source}.self_attn.{p}_proj.{kind}") for p in "qkv"]
            )
    for norm in ("q_norm", "k_norm") if head_norms else ():
        weights[f"{ours}.{norm}.weight"] = tensors.take(f"{source}.self_attn.{norm}.weight")
    bias = tensors.take_if_there(f"{source}.self_attn.o_proj.bias")
    if bias is not None and bias.any():
        raise ValueError(f"{tensors.path}: {source}.self_attn.o_proj.bias is not 0; layers with it are not served")
    return weights


def expect_shapes(
    path: Path, weights: Mapping[str, Tensor], layer: str, shape: LayerShape, size: int, inputs: int
) -> None:
    """Raise ValueError for a layer's matrices, by our names, that are not of the shape that `config.json` says, for
    hidden size `size` and an attention that reads `inputs` numbers."""
    heads = shape.num_heads * shape.head_size
    expected = {
        "qkv": (heads + 2 * shape.num_kv_heads * shape.head_size, inputs),
        "attention_out": (size, heads),
        "gate_up": (2 * shape.intermediate_size, size),
        "down": (size, shape.intermediate_size),
    }
    for name, wanted in expected.items():
        if (actual := tuple(weights[f"{layer}.{name}.weight"].shape)) != wanted:
            raise ValueError(
                f"{path}: the weights {name} of {layer} have shape {actual}, by config.json expected {wanted}"
            )
