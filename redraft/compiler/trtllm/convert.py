"""Conversion of a target and a recurrent drafter to TensorRT-LLM's ReDrafter checkpoint, and back."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.bundle.writer import TOKENIZER_FILES, copy_tokenizer, new_bundle
from redraft.compiler.methods import load_checked
from redraft.compiler.trtllm.checkpoint import (
    ARCHITECTURES,
    SHAPE,
    TrtllmError,
    hf_weights,
    parallelism_of,
    target_entries,
    target_weights,
)
from redraft.compiler.trtllm.deployment import BUILD_SCRIPT, TARGET, TRITON_SCRIPT, Limits, write_deployment
from redraft.compiler.trtllm.drafter import (
    apple_config,
    apple_weights,
    drafter_entries,
    drafter_weights,
    factors,
    own_weights,
)
from redraft.console.output import err
from redraft.console.progress import step
from redraft.home import RECORD
from redraft.model_defs.drafters.recurrent import RecurrentDrafter
from redraft.model_defs.files import read_json, read_tensors, save_tensors
from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.fingerprint import target_fingerprint
from redraft.model_defs.target.model import Target

DRAFTER, FACTORS = "drafter", "factors.safetensors"
CONFIG_FILES = ("config.json", "generation_config.json")


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


@dataclass(frozen=True)
class Settings:
    """What an export decides, besides target and drafter."""

    tp_size: int
    dtype: Dtype
    parallel_embedding: bool
    beam_width: int
    beam_length: int
    greedy: bool
    limits: Limits
    zero_state: bool = False
    """Whether a drafter that was trained from another first state drafts from zero"""

    def entries(self) -> dict[str, Any]:
        """What config.json says of it."""
        return {
            "dtype": self.dtype.value,
            "mapping": {"world_size": self.tp_size, "tp_size": self.tp_size, "pp_size": 1},
            "use_parallel_embedding": self.parallel_embedding,
            "embedding_sharding_dim": 0,
            "redrafter_num_beams": self.beam_width,
            "redrafter_draft_len_per_beam": self.beam_length,
            "redrafter_greedy_search": self.greedy,
        }


def export_checkpoint(model: Path, drafter: Path, output: Path, settings: Settings) -> None:
    """Write a checkpoint's folder. Raises BundleError, ValueError or OSError."""
    tp_size, dtype = settings.tp_size, getattr(torch, settings.dtype)
    with step("load target and drafter"):
        target = Target.from_folder(model, torch.bfloat16)
        module = load_checked(drafter, target, target_fingerprint(target))
        if not isinstance(module, RecurrentDrafter):
            raise TrtllmError(f"{drafter} holds a drafter {module.name!r}: TensorRT-LLM's ReDrafter takes 'recurrent'")
        if settings.zero_state:
            module.config = replace(module.config, initial_state="zero")
        drafted = drafter_weights(module, tp_size)
    weights = target_weights(target) | drafted
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    if lost := [name for name, weight in cast.items() if not weight.isfinite().all()]:
        raise TrtllmError(f"{lost[0]} has values that {settings.dtype} cannot hold; --dtype bfloat16 may")
    parallelism = parallelism_of(target.config, tp_size, 0 if settings.parallel_embedding else None)
    split = {name: parallelism.split(name, weight) for name, weight in cast.items()}
    needed = sum(part.nbytes for parts in split.values() for part in parts)
    with new_bundle(output, needed + 20_000_000, lambda old: (old / BUILD_SCRIPT).is_file()) as folder:
        with step(f"write {tp_size} rank{'s' if tp_size > 1 else ''}"):
            for rank in range(tp_size):
                mine = {name: parts[rank] for name, parts in split.items()}
                save_tensors(owned(mine), folder / f"rank{rank}.safetensors", metadata={"format": "pt"})
        config = target_entries(target.config) | settings.entries() | drafter_entries(module, drafted)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        draft_tokens = settings.beam_width * settings.beam_length
        write_deployment(folder, settings.dtype.value, tp_size, draft_tokens, settings.limits)
        write_rest(folder, model, drafter, factors(module))
        if settings.zero_state:
            card = folder / DRAFTER / "config.json"
            card.write_text(json.dumps(read_json(card) | {"initial_state": "zero"}, indent=2) + "\n")
    if rounded := [name for name, weight in weights.items() if not torch.equal(cast[name].to(weight.dtype), weight)]:
        names = ", ".join(rounded[:3]) + (", ..." if len(rounded) > 3 else "")
        err.print(f"  rounded to {settings.dtype}: {len(rounded)} of {len(weights)} weights ({names})")
    err.print(f"[green]{output}[/green]: {needed / 1e6:.0f} MB, TP {tp_size}; next: {BUILD_SCRIPT}, {TRITON_SCRIPT}")


def write_rest(folder: Path, model: Path, drafter: Path, kept: dict[str, Tensor]) -> None:
    """What TensorRT-LLM's files have no place for: the target's configuration and tokenizer (in a form that
    transformers 4 reads, which TensorRT-LLM has), the drafter's configuration and `kept`."""
    (folder / TARGET).mkdir()
    copy_tokenizer(model, folder / TARGET)
    copy_files(model, folder / TARGET, CONFIG_FILES)
    describe_floats(folder / TARGET)
    tokenizer = folder / TARGET / "tokenizer_config.json"
    if tokenizer.is_file():
        settings = read_json(tokenizer)
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            tokenizer.write_text(json.dumps(settings, indent=2) + "\n")
    (folder / DRAFTER).mkdir()
    copy_files(drafter, folder / DRAFTER, ("config.json",))
    if kept:
        save_tensors(kept, folder / DRAFTER / FACTORS)


def describe_floats(folder: Path) -> None:
    """Drop from a copied `config.json` how the model's own weights are quantized: those beside it are floats."""
    card = folder / "config.json"
    fields = read_json(card)
    if fields.pop("quantization_config", None):
        card.write_text(json.dumps(fields, indent=2) + "\n")


def import_checkpoint(checkpoint: Path, model: Path, output: Path) -> None:
    """Write `output`/target and `output`/drafter. Raises BundleError, ValueError, OSError, or KeyError (a missing
    weight's or field's name)."""
    raw = read_json(checkpoint / "config.json")
    check_importable(raw, checkpoint)
    if not (model / "config.json").is_file():
        raise TrtllmError(
            f"{model} has no config.json: --model names a folder with the target's config.json and tokenizer"
        )
    config = TargetConfig.load(model)
    expected = target_entries(config)
    if wrong := [name for name in SHAPE if raw.get(name) not in (None, expected[name])]:
        raise TrtllmError(
            f"{checkpoint} holds another target than {model}/config.json: {wrong[0]} is {raw[wrong[0]]}, "
            f"expected {expected[wrong[0]]}"
        )
    with step("read the ranks"):
        weights = read_ranks(checkpoint, raw, config)
        target = hf_weights(weights, config)
        Target.check_weights(target, config)
    needed = sum(weight.nbytes for weight in weights.values())
    is_import = lambda old: (old / TARGET / RECORD).is_file()  # noqa: E731
    with new_bundle(output, needed + 20_000_000, is_import) as folder, step("write and load target and drafter"):
        (folder / TARGET).mkdir()
        copy_files(model, folder / TARGET, (*CONFIG_FILES, *TOKENIZER_FILES))
        describe_floats(folder / TARGET)
        save_tensors(owned(target), folder / TARGET / "model.safetensors", metadata={"format": "pt"})
        (folder / TARGET / RECORD).write_text(json.dumps({"source": str(checkpoint.resolve())}, indent=2) + "\n")
        loaded = Target.from_folder(folder / TARGET, torch.bfloat16)
        fingerprint = target_fingerprint(loaded)
        write_drafter(folder / DRAFTER, checkpoint / DRAFTER, raw, weights, fingerprint)
        load_checked(folder / DRAFTER, loaded, fingerprint)
    err.print(f"[green]{output}[/green]: {TARGET}/ and {DRAFTER}/, {needed / 1e6:.0f} MB")


def check_importable(raw: dict[str, Any], checkpoint: Path) -> None:
    """Raises TrtllmError for a checkpoint that is not ReDrafter's, or not plain."""
    if raw.get("architecture") not in ARCHITECTURES:
        raise TrtllmError(
            f"{checkpoint} holds architecture {raw.get('architecture')!r}, expected one of {', '.join(ARCHITECTURES)}"
        )
    quantization = raw.get("quantization") or {}
    if algorithm := quantization.get("quant_algo"):
        raise TrtllmError(f"{checkpoint} is quantized ({algorithm}): its weights are not the target's any more")
    if (stages := raw["mapping"].get("pp_size", 1)) != 1:
        raise TrtllmError(
            f"{checkpoint} has {stages} pipeline stages, expected 1: ReDrafter has only tensor parallelism"
        )
    if not raw["redrafter_is_rnn"]:
        raise TrtllmError(f"{checkpoint} has redrafter_is_rnn false: heads without recurrence are no recurrent drafter")


def read_ranks(checkpoint: Path, raw: dict[str, Any], config: TargetConfig) -> dict[str, Tensor]:
    """The whole weights of a checkpoint. Raises TrtllmError, FileNotFoundError or ValueError (a broken file)."""
    tp_size = raw["mapping"].get("tp_size", 1)
    dim = raw.get("embedding_sharding_dim", 0) if raw.get("use_parallel_embedding") else None
    parallelism = parallelism_of(config, tp_size, dim)
    ranks = [read_tensors(checkpoint / f"rank{rank}.safetensors") for rank in range(tp_size)]
    for rank, weights in enumerate(ranks):
        if odd := sorted(weights.keys() ^ ranks[0].keys()):
            raise TrtllmError(f"{checkpoint}: ranks 0 and {rank} hold different weights, one of them no {odd[0]}")
    return {name: parallelism.join(name, [weights[name] for weights in ranks]) for name in ranks[0]}


def write_drafter(folder: Path, rest: Path, raw: dict[str, Any], weights: dict[str, Tensor], fingerprint: str) -> None:
    """The drafter in the format that it had, of which `rest` tells, or else in Apple's. `fingerprint` is the target's,
    which is another where the checkpoint's dtype rounded its weights."""
    folder.mkdir()
    config = read_json(rest / "config.json") if rest.is_dir() else apple_config(raw)
    if "drafter" in config:
        config["target_fingerprint"] = fingerprint
        kept = read_tensors(rest / FACTORS) if (rest / FACTORS).is_file() else {}
        save_tensors(owned(own_weights(weights, config, kept)), folder / "drafter.safetensors")
    else:
        save_tensors(owned(apple_weights(weights, config)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def owned(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that share no memory, as safetensors wants them."""
    return {name: weight.clone(memory_format=torch.contiguous_format) for name, weight in weights.items()}


def copy_files(source: Path, destination: Path, names: tuple[str, ...]) -> None:
    """Copy those files that there are."""
    for name in names:
        if (source / name).is_file():
            shutil.copy2(source / name, destination / name)
