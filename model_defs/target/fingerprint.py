"""Which target a drafter was trained for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from typing import Any

import torch

from redraft.model_defs.target.config import TargetConfig
from redraft.model_defs.target.model import Target

SAMPLED_ROWS = 1024


def target_fingerprint(target: Target) -> str:
    """16 hexadecimal digits of a target's shape and of some of its weights, as bf16: the same in every precision."""
    digest = hashlib.sha256(json.dumps(described(target.config), sort_keys=True).encode())
    down = "experts.down" if target.config.experts else "down.weight"
    for name in ("norm.weight", "embedding.weight", f"layers.{target.config.num_layers - 1}.{down}"):
        sample = target.first_rows(name, SAMPLED_ROWS).detach().to(torch.bfloat16).cpu().contiguous()
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def described(config: TargetConfig) -> dict[str, Any]:
    """The fields that tell targets apart, without features that a target does not have: what knows nothing of a new
    feature keeps its fingerprint."""
    values = asdict(config)
    absent = {field.name for field in fields(config) if values[field.name] == field.default} | {
        "family",
        "float32_norms",
    }
    rope = {name: value for name, value in values["rope"].items() if value is not None}
    return {name: value for name, value in values.items() if name not in absent} | {"rope": rope}
