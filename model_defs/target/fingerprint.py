"""Which target a drafter was trained for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import torch

from model_defs.target.model import Target

SAMPLED_ROWS = 1024


def target_fingerprint(target: Target) -> str:
    """16 hexadecimal digits of a target's shape and of some of its weights, as bf16: the same in every precision."""
    digest = hashlib.sha256(json.dumps(asdict(target.config), sort_keys=True).encode())
    last = target.get_parameter(f"layers.{target.config.num_layers - 1}.down.weight")
    for weight in (target.norm.weight, target.embedding.weight, last):
        sample = weight[:SAMPLED_ROWS].detach().to(torch.bfloat16).cpu().contiguous()
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
