"""ReDrafter checkpoints: Apple's, and TensorRT-LLM's, which are converted."""

from __future__ import annotations

from collections.abc import Mapping

from redraft.model_defs.drafters.hub.folder import HubFolder, Reader, Reading
from redraft.model_defs.drafters.recurrent import RecurrentDrafter, from_apple
from redraft.model_defs.target.config import TargetConfig


def holds(folder: HubFolder) -> bool:
    return "num_draft_layers" in folder.config


def read(folder: HubFolder, target: TargetConfig, answers: Mapping[str, str]) -> Reading:
    tensors = folder.tensors()
    reading = Reading(*from_apple(folder.config, tensors))
    tensors.require_all_taken(REDRAFTER.form)
    return reading


def is_trtllm(folder: HubFolder) -> bool:
    """Whether it is a checkpoint of TensorRT-LLM, which holds a target and its drafter."""
    return str(folder.config.get("architecture")).startswith("ReDrafter")


REDRAFTER = Reader("Apple's ReDrafter", RecurrentDrafter.name, holds, read)
