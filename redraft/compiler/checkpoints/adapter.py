"""LoRA adapters of PEFT, merged into a checkpoint as its tensors are read: W + scale B A for each weight they name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from redraft.compiler.checkpoints.source import TOKENIZER, Checkpoint, FetchError
from redraft.model_defs.files import FLOATS, load_pickled, read_json, read_tensors, require_finite, row_chunks
from redraft.model_defs.target.bounds import COUNTS, is_number, shown
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import HEAD, weights_of
from redraft.model_defs.weights.names import own_name

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
"""Before the names of all of an adapter's tensors"""
READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias"),
    *("modules_to_save", "init_lora_weights"),
}
IGNORED = {
    *("task_type", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "auto_mapping"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "peft_version"),
    *("loftq_config", "eva_config", "corda_config", "runtime_config", "megatron_config", "megatron_core"),
    *("qalora_group_size", "ensure_weight_tying", "lora_ga_config"),
}
"""Fields that change nothing once an adapter is trained: which weights it has, its tensors tell. PEFT itself sets
`fan_in_fan_out` to false for linear layers."""
KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal", "loftq")
"""Values of `init_lora_weights` that leave the model's own weights as they are"""
EMPTY: tuple[Any, ...] = (None, False, [], {}, "")
PARTS = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_embedding_A": "A",
    "lora_embedding_B": "B",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
TABLE = "lora_embedding_A"
"""The key of an embedding's A, which is [r, tokens]; its B is [hidden, r]."""


class AdaptedCheckpoint:
    """A checkpoint with an adapter merged into it; see `compiler.checkpoints.source.Checkpoint`."""

    def __init__(self, base: Checkpoint, folder: Path):
        """Read the adapter. Raises FetchError for one that cannot be merged, with the field or tensor, or ValueError
        for damaged files."""
        self._base, self._folder = base, folder
        self.title = f"{base.title} with {folder.resolve().name}"
        self.precision, self.config, self.remarks = base.precision, base.config, [*base.remarks]
        if base.files:
            self.remarks.append("weights with an adapter merged into them are written as bfloat16")
        if (folder / TOKENIZER).exists():
            self.remarks.append(f"{folder} has a tokenizer of its own: the model's is taken")
        self.files: dict[str, Path] = {}
        self._shapes = dict(base.shapes())
        self._settings = read_settings(folder)
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._saved: dict[str, Tensor] = {}
        self._tables: set[str] = set()
        for name, tensor in _read_tensors(folder).items():
            self._take(name, tensor)
        target = TargetConfig.from_hf(self.config)
        (self._embedding,) = weights_of(target)["embedding.weight"].sources
        if target.tie_embeddings:
            self._untie()
        self._check()
        tensors = [*self._saved.values(), *(part for parts in self._parts.values() for part in parts.values())]
        self.memory = base.memory + sum(tensor.nbytes for tensor in tensors)

    def shapes(self) -> dict[str, Tensor]:
        """Meta tensors by Hugging Face name."""
        return self._shapes

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A merged tensor's rows as float32 chunks, or as the checkpoint has them where the adapter leaves them."""
        parts, begin = self._parts.get(name), 0
        for chunk in self._plain_chunks(name):
            rows = slice(begin, begin + len(chunk))
            yield chunk if parts is None else self._merged(name, chunk.float(), rows, parts)
            begin = rows.stop

    def _plain_chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor's rows before matrices are merged. Adapters hold embeddings whole beside the matrices for them."""
        if (saved := self._saved.get(name)) is not None:
            return (saved[rows] for rows in row_chunks(tuple(saved.shape)))
        return self._base.chunks(name if name in self._base.shapes() else self._embedding)

    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        return self._base.tokenizer()

    def copy_settings(self, folder: Path) -> None:
        """Copy what belongs to the checkpoint."""
        self._base.copy_settings(folder)

    def _take(self, name: str, tensor: Tensor) -> None:
        """Sort in one of the adapter's tensors."""
        if tensor.dtype not in FLOATS:
            raise FetchError(f"{self._folder}: {name} is {tensor.dtype}, expected floating point")
        require_finite(tensor, name, self._folder)
        base_name = own_name(name.removeprefix(PREFIX))
        for ending, part in PARTS.items():
            if base_name.endswith(f".{ending}"):
                weight = f"{base_name.removesuffix(ending)}weight"
                self._parts.setdefault(weight, {})[part] = tensor.float()
                self._tables |= {weight} if ending == TABLE else set()
                return
        self._saved[base_name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = tensor

    def _untie(self) -> None:
        """Give embeddings and head weights of their own where the adapter holds one of them, as PEFT does. Raises
        FetchError for matrices that would change one of them only."""
        if changed := [name for name in (self._embedding, HEAD) if name in self._parts]:
            raise FetchError(
                f"{self._folder} changes {changed[0]}, which the model ties to its other end: expected modules_to_save"
            )
        if self._saved.keys() & {self._embedding, HEAD}:
            self.config = self.config | {"tie_word_embeddings": False}
            self._shapes[HEAD] = self._shapes[self._embedding]

    def _check(self) -> None:
        """Raise FetchError for tensors that fit no weight."""
        for name, saved in self._saved.items():
            if name not in self._shapes or saved.shape != self._shapes[name].shape:
                there = tuple(self._shapes[name].shape) if name in self._shapes else "none"
                raise FetchError(f"{self._folder} holds {name} {tuple(saved.shape)}, and the model has {there}")
        for name, parts in self._parts.items():
            if name not in self._shapes:
                raise FetchError(f"{self._folder} changes {name}, which the model does not have")
            if missing := {"A", "B"} - parts.keys():
                raise FetchError(f"{self._folder} has no lora_{min(missing)} of {name}")
            a, b = parts["A"], parts["B"]
            if self._shapes[name].ndim != 2:
                raise FetchError(f"{self._folder} changes {name}, which is no matrix")
            rows, columns = tuple(self._shapes[name].shape)
            expected = (columns, rows) if name in self._tables else (rows, columns)
            if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or (len(b), a.shape[1]) != expected:
                shapes = f"A {tuple(a.shape)} and B {tuple(b.shape)}"
                raise FetchError(f"{self._folder}: {shapes} do not fit {name}, which has shape {(rows, columns)}")
            rank = self._of("rank_pattern", name, self._settings["r"])
            if len(a) != rank:
                raise FetchError(f"{self._folder}: {name} has rank {len(a)}, and {CONFIG} says {rank}")
            if ("magnitude" in parts) != bool(self._settings.get("use_dora")) or (
                "magnitude" in parts and (name in self._tables or parts["magnitude"].numel() != rows)
            ):
                raise FetchError(f"{self._folder}: use_dora and the lora_magnitude_vector of {name} do not fit")

    def _of(self, pattern: str, name: str, usual: Any) -> Any:
        """A weight's own setting, or else the usual one; keys are the ends of modules' names, or patterns of them."""
        module = name.removesuffix(".weight")
        overrides: Mapping[str, Any] = self._settings.get(pattern) or {}
        return next((value for key, value in overrides.items() if re.match(rf"(.*\.)?({key})$", module)), usual)

    def _merged(self, name: str, chunk: Tensor, rows: slice, parts: Mapping[str, Tensor]) -> Tensor:
        """Some rows [n, columns] of a weight, merged. DoRA sets the norm of each row (Liu et al., 2024)."""
        a, b = parts["A"], parts["B"]
        rank = math.sqrt(len(a)) if self._settings.get("use_rslora") else len(a)
        scale = self._of("alpha_pattern", name, self._settings["lora_alpha"]) / rank
        change = a[:, rows].T @ b.T if name in self._tables else b[rows] @ a
        merged = chunk + scale * change
        if "magnitude" not in parts:
            return merged
        return merged * (parts["magnitude"].flatten()[rows] / merged.norm(dim=1))[:, None]


def read_settings(folder: Path) -> dict[str, Any]:
    """An adapter's configuration. Raises FetchError for one that is not merged here, which names the field."""
    file = folder / CONFIG
    if not file.is_file():
        raise FetchError(f"{folder} is not an adapter: it has no {CONFIG}")
    settings = read_json(file)
    if (kind := settings.get("peft_type")) != "LORA":
        raise FetchError(f"{file}: peft_type {shown(kind)}, expected 'LORA'")
    unknown = [name for name, value in settings.items() if name not in READ | IGNORED and value not in EMPTY]
    if unknown:
        raise FetchError(f"{file}: {unknown[0]} {shown(settings[unknown[0]])} is not merged here")
    if (start := settings.get("init_lora_weights", True)) not in KEEPS_BASE:
        raise FetchError(
            f"{file}: init_lora_weights {shown(start)} changes the model's own weights: "
            "save the adapter as a plain LoRA"
        )
    if type(settings.get("r")) is not int or not 1 <= settings["r"] <= COUNTS["hidden_size"]:
        raise FetchError(f"{file}: r is {shown(settings.get('r'))}, expected a whole number above 0")
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(name) or {}
        if not isinstance(patterns, dict) or not all(is_number(value) and value > 0 for value in patterns.values()):
            raise FetchError(f"{file}: {name} is {shown(patterns)}, expected numbers by module")
        for key in patterns:
            try:
                re.compile(key)
            except re.error as error:
                raise FetchError(f"{file}: {name} has the key {shown(key)}, which is no pattern ({error})") from None
    if not is_number(settings.get("lora_alpha")):
        raise FetchError(f"{file}: lora_alpha is {shown(settings.get('lora_alpha'))}, expected a number")
    return settings


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """An adapter's tensors. Raises FetchError, or ValueError for a damaged file."""
    if (folder / WEIGHTS).is_file():
        return read_tensors(folder / WEIGHTS)
    if (folder / PICKLED).is_file():
        return load_pickled(folder / PICKLED)
    raise FetchError(f"{folder} is not an adapter: it has no {WEIGHTS}")
